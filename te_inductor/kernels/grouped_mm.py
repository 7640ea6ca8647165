"""Experts' FP8 products on Hopper: templates/triton/grouped_mm.py. Many rows that meet experts' stored
FP8 weights are multiplied so as well, once they are cast. How the work is cut is found at each launch, as M may be a
symbol."""

from dataclasses import dataclass

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import GROUPED, STORED_EXPERTS, Problem
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR
from te_inductor.targets import Ability, Target

BLOCK_M, BLOCK_K = 128, 128  # rows of a tile, and columns of K at a time
STAGES = {128: 6, 256: 4}  # what shared memory holds, by the columns of a tile
# Rows up to which a GPU multiplies with stored values as they are, experts_decode.py: so many times the number of
# experts, or so many if that is more.
FEW_EACH, FEW = 16, 512
DTYPES = (torch.bfloat16, torch.float16)  # of these rows


@dataclass(frozen=True)
class GroupedConfig:
    """How the work is cut, beside what the kernel fixes."""

    block_n: int  # columns of a tile, 128 or 256
    stages: int  # of 128 columns of K on their way
    band: int = 16  # rows of tiles that are taken before the next columns, which L2 then holds

    def __str__(self) -> str:
        return f"{BLOCK_M} x {self.block_n}, {self.stages} stages, bands of {self.band}"

    @property
    def shared_memory(self) -> int:
        """Bytes, at most."""
        scales = self.block_n * 4
        return self.stages * ((BLOCK_M + self.block_n) * BLOCK_K + scales) + 1024


def cut(m: int, n: int, multiprocessors: int) -> GroupedConfig:
    """The config for groups that are M rows in all: wide tiles, if there are enough of them for every multiprocessor."""
    tiles = -(-m // BLOCK_M) * -(-n // 256)  # at each call, where `triton.cdiv` would take the host longer
    block_n = 256 if n > 128 and tiles >= multiprocessors else 128
    return GroupedConfig(block_n, STAGES[block_n])


def takes(gemm: Gemm) -> bool:
    """Whether there is such a kernel, and of a wgrad, with these scales."""
    scopes = gemm.granularities
    blocks = (BLOCK_1X128, BLOCK_1X128 if gemm.name == "wgrad" else BLOCK_128X128)
    return scopes == blocks or all(scope in (TENSOR, ROW) for scope in scopes)


def runs(target: Target, gemm: Gemm) -> bool:
    """Whether a device runs the kernels, with scales that layers of experts may have."""
    return Ability.GROUPED_KERNELS in target.can and not gemm.microscaled


def has_few_rows(problem: Problem) -> bool:
    """Whether stored values are multiplied by rows as they are."""
    assert problem.stored is not None
    m, count = problem.sizes.m, problem.sizes.experts
    return m is not None and problem.stored.rows in DTYPES and bool(m <= max(FEW, FEW_EACH * count))  # type: ignore[operator]


def _supports(problem: Problem) -> Refusal | None:
    if not runs(problem.target, problem.gemm):
        return Refusal("no grouped FP8 GEMM on %s", problem.target.name)
    if problem.form == GROUPED:
        return None
    scope, n = problem.gemm.granularities[0], problem.sizes.n
    if has_few_rows(problem):
        return Refusal("few rows are multiplied as they are")
    if problem.is_nvfp4 or n % ALIGNMENT or (scope.blocked and not scope.one_row):
        return Refusal("rows are not cast, or N=%s is not a multiple of %d", n, ALIGNMENT)
    return None


def _library_supports(problem: Problem) -> Refusal | None:
    gemm, leaves = problem.gemm, problem.program.leaves
    if leaves and _supports(problem) is None:
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


FAMILY = KernelFamily("triton:grouped_mm", (GROUPED, STORED_EXPERTS), _supports)
# The library that torch brings (`torch._scaled_grouped_mm`, and its second version for four bits): MXFP8, MXFP4 and NVFP4
# on Blackwell, runtime/grouped_library.py; FP8 on Hopper in programs that leave the process.
LIBRARY = KernelFamily("cutlass:_scaled_grouped_mm", (GROUPED, STORED_EXPERTS), _library_supports)
