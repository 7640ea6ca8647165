"""cuBLASLt, by torch._scaled_mm: what multiplies where nothing was measured to be faster, and what max-autotune measures it
against. What is stored is cast, or written out, before it."""

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import cutlass_tiles, nvfp4_linear
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, STORED, STORED_EXPERTS, Problem


def multiplies(problem: Problem) -> Refusal | None:
    if not problem.target.multiplies(problem.gemm):
        return Refusal(
            "%s has no tensor cores for %s and %s with scales of %s and %s",
            *(problem.target.name, *problem.gemm.elements, *problem.gemm.scopes),
        )
    return None


def autotunes(problem: Problem) -> Refusal | None:
    if not problem.program.autotunes:
        return Refusal("max-autotune was not asked for")
    gemm = problem.gemm
    if gemm.blocked and not (gemm.microscaled and cutlass_tiles.architecture(problem) is not None):
        # fp32 scales of blocks nothing but cuBLASLt is right for.
        return Refusal("no two kernels multiply with scales of %s and %s", *gemm.scopes)
    return multiplies(problem)


def _recasts(problem: Problem) -> Refusal | None:
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


def _writes_out(problem: Problem) -> Refusal | None:
    if not problem.target.is_gpu:
        return Refusal("a CPU multiplies by what is stored")
    if not problem.is_nvfp4:
        return Refusal("FP8 values are multiplied as they are stored")
    asks = problem.form == STORED and not problem.program.leaves and nvfp4_linear.refuses_rows(problem) is None
    if asks and nvfp4_linear.is_few(problem):
        return Refusal("the op multiplies few rows by what is stored")
    return None


FAMILY = KernelFamily("cublaslt", (DENSE,), multiplies)
# Whatever Inductor measures to be fastest: cuBLASLt, its Triton templates, CUTLASS's tiles
# (lowerings/gemm/cutlass_choices.py).
AUTOTUNED = KernelFamily("inductor", (DENSE,), autotunes)
# FP8 GEMMs of many rows with a weight stored in NVFP4, which is cast to FP8 before them.
RECAST = KernelFamily("cublaslt", (STORED,), _recasts)
# GEMMs in high precision of stored values.
WRITTEN_OUT = KernelFamily("cublaslt", (STORED, STORED_EXPERTS), _writes_out)
