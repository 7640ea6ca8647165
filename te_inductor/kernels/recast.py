"""FP8 GEMMs of many rows with a weight stored in NVFP4, which is cast to FP8 before them."""

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import nvfp4_linear
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import STORED, Problem


def supports(problem: Problem) -> Refusal | None:
    refusal = nvfp4_linear.refuses_rows(problem)
    if refusal is not None:
        return refusal
    if not nvfp4_linear.casts_rows(problem):
        return Refusal("the recipe or %s keeps rows in high precision", problem.target.name)
    if problem.program.leaves and isinstance(problem.sizes.m, torch.SymInt):
        return Refusal("a program that leaves the process asks nothing of a symbolic size")
    if nvfp4_linear.is_few(problem):
        return Refusal("few rows")
    return None


FAMILY = KernelFamily("cublaslt", (STORED,), supports)
