"""FP8 without tensor cores for it: generated code multiplies in fp32 what the operands hold."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, Problem
from te_inductor.numerics import scaled_products


def _supports(problem: Problem) -> Refusal | None:
    if problem.gemm.microscaled:
        return Refusal("scales of %s and %s are emulated", *problem.gemm.scopes)
    return None


FAMILY = KernelFamily("inductor", (DENSE,), _supports, written=scaled_products.exact)
