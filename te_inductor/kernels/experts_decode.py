"""Rows by experts' stored weights, each of which is read once: templates/triton/experts_decode.py, for few rows, and for as
many as there are where no other kernel takes them."""

from dataclasses import dataclass

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import grouped_mm, nvfp4_linear
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import STORED_EXPERTS, Problem
from te_inductor.recipes.formats import BLOCK_128X128, E4M3, ROW, TENSOR, Element, Scope
from te_inductor.targets import Ability, Target

SCOPES = {TENSOR: 0, ROW: 1, BLOCK_128X128: 2}  # of an FP8 weight, as the kernel numbers them
_COMPARED = 16384


@dataclass(frozen=True)
class ExpertsConfig:
    """How the work is cut."""

    rows: int  # of x in one program
    block_k: int  # columns at a time
    stages: int  # of those on their way
    warps: int = 4


def cut(m: int, count: int, k: int, nvfp4: bool, by_ids: bool = False) -> ExpertsConfig:
    """The config for m rows, `count` experts and matrices of k columns."""
    each = m / count
    rows = 16 if each <= 8 else 32 if each <= 24 else 64
    if by_ids:  # each of a program's rows is compared with all of them
        rows = min(rows, max(16, _COMPARED // (1 << (max(m, 1) - 1).bit_length())))
    block_k = 256 if nvfp4 and rows == 16 and k % 256 == 0 else 128
    return ExpertsConfig(rows, block_k, 4 if rows < 64 else 3)


def scales_as(element: Element, scope: Scope) -> bool:
    """Whether the FP8 kernel takes weights with these values and scales."""
    return element is E4M3 and scope in SCOPES


def runs(target: Target, nvfp4: bool, rows: torch.dtype) -> bool:
    """Whether a device multiplies such rows by weights stored in NVFP4, or in FP8."""
    return rows in grouped_mm.DTYPES and (nvfp4_linear.runs(target) if nvfp4 else Ability.FP8 in target.can)


def _supports(problem: Problem) -> Refusal | None:
    assert problem.stored is not None
    target, rows = problem.target, problem.stored.rows
    if not runs(target, problem.is_nvfp4, rows):
        return Refusal("no kernel on %s for rows in %s", target.name, str(rows).removeprefix("torch."))
    few = grouped_mm.has_few_rows(problem)
    if not few and (problem.is_nvfp4 or grouped_mm.FAMILY.supports(problem) is None):
        return Refusal("many rows")
    if not problem.is_nvfp4 and not scales_as(problem.gemm.formats[1], problem.gemm.granularities[1]):
        return Refusal("a weight of %s with scales of %s", problem.gemm.elements[1], problem.gemm.scopes[1])
    return None


FAMILY = KernelFamily("triton:experts_decode", (STORED_EXPERTS,), _supports)
