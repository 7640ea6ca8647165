"""Whatever Inductor measures to be fastest under max-autotune: cuBLASLt, its Triton templates, CUTLASS's tiles
(lowerings/gemm/cutlass_choices.py)."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import cublaslt, cutlass_tiles
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, Problem


def supports(problem: Problem) -> Refusal | None:
    if not problem.program.autotunes:
        return Refusal("max-autotune was not asked for")
    gemm = problem.gemm
    if gemm.blocked and not (gemm.microscaled and cutlass_tiles.architecture(problem) is not None):
        # fp32 scales of blocks nothing but cuBLASLt is right for.
        return Refusal("no two kernels multiply with scales of %s and %s", *gemm.scopes)
    return cublaslt.supports(problem)


FAMILY = KernelFamily("inductor", (DENSE,), supports)
