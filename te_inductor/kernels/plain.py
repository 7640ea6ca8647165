"""Families without a kernel of their own: the eager form of an op, torch's own GEMMs of what is not cast, and arithmetic in
high precision that code is generated for, on tensors and in it alike."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, GROUPED, STORED, STORED_EXPERTS, Problem
from te_inductor.numerics import scaled_products


def _emulates(problem: Problem) -> Refusal | None:
    if not problem.gemm.microscaled:
        return Refusal("scales of %s and %s are no microscales", *problem.gemm.scopes)
    return None


def _is_exact(problem: Problem) -> Refusal | None:
    if problem.gemm.microscaled:
        return Refusal("scales of %s and %s are emulated", *problem.gemm.scopes)
    return None


def _is_high(problem: Problem) -> Refusal | None:
    return None if problem.gemm.is_high else Refusal("operands are cast to %s and %s", *problem.gemm.elements)


# On a CPU, and where no kernel is left.
EAGER = KernelFamily("eager", (GROUPED, STORED, STORED_EXPERTS), lambda problem: None)
# Without tensor cores that apply microscales: what operands hold, multiplied in high precision. Note [Emulated GEMMs] in
# runtime/microscaling.py.
EMULATED = KernelFamily("emulated", (DENSE, GROUPED), _emulates, written=scaled_products.emulated)
# FP8 without tensor cores for it: what operands hold, multiplied in fp32.
EXACT = KernelFamily("inductor", (DENSE,), _is_exact, written=scaled_products.exact)
# What a backward in high precision multiplies with.
UNCAST = KernelFamily("high_precision", (DENSE, GROUPED), _is_high, written=scaled_products.high)
