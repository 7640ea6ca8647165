"""A GEMM in high precision of stored values that are written out before it."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import nvfp4_linear
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import STORED, STORED_EXPERTS, Problem


def _supports(problem: Problem) -> Refusal | None:
    if not problem.target.is_gpu:
        return Refusal("a CPU multiplies by what is stored")
    if not problem.is_nvfp4:
        return Refusal("FP8 values are multiplied as they are stored")
    asks = problem.form == STORED and not problem.program.leaves and nvfp4_linear.refuses_rows(problem) is None
    if asks and nvfp4_linear.is_few(problem):
        return Refusal("the op multiplies few rows by what is stored")
    return None


FAMILY = KernelFamily("cublaslt", (STORED, STORED_EXPERTS), _supports)
