"""Experts' products by the library that torch brings (`torch._scaled_grouped_mm`, and its second version for four bits):
MXFP8, MXFP4 and NVFP4 on Blackwell, runtime/grouped_library.py; FP8 on Hopper in programs that leave the process."""

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import grouped_mm
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import GROUPED, STORED_EXPERTS, Problem


def _supports(problem: Problem) -> Refusal | None:
    gemm, leaves = problem.gemm, problem.program.leaves
    if leaves and grouped_mm.FAMILY.supports(problem) is None:
        return None
    if problem.form == STORED_EXPERTS:
        return Refusal("no library multiplies by FP8 weights that are stored")
    if not problem.target.multiplies_groups(gemm):
        return Refusal("no library's kernel on %s with scales of %s and %s", problem.target.name, *gemm.scopes)
    dtypes = {problem.out, problem.held or problem.out}
    if dtypes != {torch.bfloat16}:
        return Refusal("activations and weights in %s, expected bfloat16", ", ".join(sorted(map(str, dtypes))))
    if leaves and gemm.packed > 1:
        return Refusal("a program that leaves the process has the library's MXFP8 alone")
    return None


FAMILY = KernelFamily("cutlass:_scaled_grouped_mm", (GROUPED, STORED_EXPERTS), _supports)
