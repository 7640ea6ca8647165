"""Microscaled operands without tensor cores that apply their scales: generated code multiplies in high precision what they
hold. Note [Emulated GEMMs] in runtime/microscaling.py."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, GROUPED, Problem
from te_inductor.numerics import scaled_products


def _supports(problem: Problem) -> Refusal | None:
    if not problem.gemm.microscaled:
        return Refusal("scales of %s and %s are no microscales", *problem.gemm.scopes)
    return None


FAMILY = KernelFamily("emulated", (DENSE, GROUPED), _supports, written=scaled_products.emulated)
