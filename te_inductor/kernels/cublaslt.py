"""cuBLASLt, by torch._scaled_mm: what multiplies where nothing was measured to be faster."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, Problem


def supports(problem: Problem) -> Refusal | None:
    if not problem.target.multiplies(problem.gemm):
        return Refusal(
            "%s has no tensor cores for %s and %s with scales of %s and %s",
            *(problem.target.name, *problem.gemm.elements, *problem.gemm.scopes),
        )
    return None


FAMILY = KernelFamily("cublaslt", (DENSE,), supports)
