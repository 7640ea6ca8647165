"""torch's own GEMMs of tensors that are not cast, as a backward in high precision has them."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, GROUPED, Problem
from te_inductor.numerics import scaled_products


def _supports(problem: Problem) -> Refusal | None:
    return None if problem.gemm.is_high else Refusal("operands are cast to %s and %s", *problem.gemm.elements)


FAMILY = KernelFamily("high_precision", (DENSE, GROUPED), _supports, written=scaled_products.high)
