"""``a[rows of a group] @ b[group].T`` of FP8 operands, for experts, on Hopper: fprop and dgrad. The kernel is
grouped_kernel.py; wgrad is grouped_wgrad.py.

The sizes of groups are read on the device alone: the grid is as many programs as run at one time, and the number of
tiles is bounded by M and E."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_inductor import targets
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Scope
from te_inductor.templates.triton.grouped_kernel import BLOCK_K, BLOCK_M, HALF, START_REGISTERS, grouped
from te_inductor.templates.triton.launcher import Launcher

SHARED = 227 * 1024  # bytes of shared memory of a multiprocessor
MULTIPROCESSORS = 132  # of an H100 and an H200
STAGES = {128: 6, 256: 4}  # what shared memory holds, by the columns of a tile

Describe = Callable[[Tensor, list[int], Any], Any]  # a tensor, the box that a copy brings, its layout


@dataclass(frozen=True)
class Config:
    """How the work is cut, beside what the kernel fixes."""

    block_n: int  # columns of a tile, 128 or 256
    stages: int  # of 128 columns of K on their way
    band: int = 16  # rows of tiles that are taken before the next columns, which L2 then holds

    def __str__(self) -> str:
        return f"{BLOCK_M.value} x {self.block_n}, {self.stages} stages, bands of {self.band}"

    @property
    def shared_memory(self) -> int:
        """Bytes, at most."""
        scales = self.block_n * 4
        return self.stages * ((BLOCK_M.value + self.block_n) * BLOCK_K.value + scales) + 1024


def config_of(m: int, e: int, n: int, k: int) -> Config:
    """The config of groups that are M rows in all, and M / E each where e is the number of groups: wide tiles, if there
    are enough of them for every multiprocessor."""
    tiles = -(-m // BLOCK_M.value) * -(-n // 256)  # at each call, where `triton.cdiv` would take the host longer
    wide = n > 128 and tiles >= MULTIPROCESSORS
    block_n = 256 if wide else 128
    return Config(block_n, STAGES[block_n])


def supports(gemm: Gemm) -> bool:
    """Whether `grouped_mm`, or of a wgrad `grouped_wgrad`, computes it."""
    scopes = gemm.granularities
    blocks = (BLOCK_1X128, BLOCK_1X128 if gemm.name == "wgrad" else BLOCK_128X128)
    return scopes == blocks or all(scope in (TENSOR, ROW) for scope in scopes)


def check(gemm: Gemm, *sizes: int) -> None:
    """Raise where the kernel would compute something else: sites with such sizes are refused before."""
    if not supports(gemm) or any(size % ALIGNMENT for size in sizes):
        raise ValueError(
            f"a grouped {gemm.name} with scales of {gemm.scopes} and sizes {sizes}, expected multiples of {ALIGNMENT} and"
            " scales of tensors, rows, or blocks of 128"
        )


@dataclass(frozen=True)
class Call:
    """A launch of the kernel."""

    programs: int
    arguments: tuple[Any, ...]
    launcher: Launcher

    def launch(self) -> None:
        """Launches on the device of its tensors."""
        self.launcher(self.programs, *self.arguments)


def options() -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": START_REGISTERS}


def constants(gemm: Gemm, config: Config, add: bool = False) -> dict[str, Any]:
    """The kernel's, by name."""
    of_a, of_b = (_kind(scope) for scope in gemm.granularities)
    return {
        "BLOCK_N": config.block_n, "STAGES": config.stages, "BAND": config.band, "WGRAD": gemm.name == "wgrad",
        "FAST": gemm.fast_accum and not gemm.blocked, "OF_A": of_a, "OF_B": of_b, "ADD": add,
    }  # fmt: skip


def _kind(scope: Scope) -> int:
    return 2 if scope.blocked else int(scope is ROW)


def launcher_of(gemm: Gemm, config: Config, add: bool, *sizes: int) -> Launcher:
    """The launcher of a product of these sizes, which have to be multiples of 16."""
    return _launcher(gemm.name, gemm.fast_accum, gemm.scopes, gemm.elements, config, add, sizes)


@functools.cache  # of fields, as generated code makes a constant anew at each call, and hashing one takes longer
def _launcher(
    name: str,
    fast_accum: bool,
    scopes: tuple[str, str],
    elements: tuple[str, str],
    config: Config,
    add: bool,
    sizes: tuple[int, ...],
) -> Launcher:
    gemm = Gemm(name, fast_accum, scopes, elements)
    check(gemm, *sizes)
    return Launcher(grouped, **constants(gemm, config, add), **options())


@functools.cache
def box(rows: int) -> tuple[list[int], Any]:
    """What one copy brings of an operand."""
    return [rows, BLOCK_K.value], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@functools.cache
def box_of_scales() -> tuple[list[int], Any]:
    """The box of scales of blocks of rows of b."""
    return [1, HALF.value], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def grouped_mm(
    a: Tensor,  # (M, K) e4m3 or e5m2, rows sorted by group, K a multiple of 16
    a_scale: Tensor,  # fp32: (), (M, 1), or flat of (K/128, M)
    b: Tensor,  # (E, N, K) e4m3 or e5m2, N a multiple of 16
    b_scale: Tensor,  # fp32: (E,), (E, N), or (E, N/128 * K/128)
    ends: Tensor,  # (E,) int32, where the rows of a group end, those of the next begin
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:  # (M, N)
    """``(a * a_scale)[rows of g] @ (b * b_scale)[g].T + bias[g]``; rows behind the last group's are zeros."""
    out = a_scale.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        prepared(a, a_scale, b, b_scale, ends, bias, out, gemm, config).launch()
    return out


def prepared(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gemm: Gemm,
    config: Config | None = None,
    describe: Describe = TensorDescriptor.from_tensor,
    programs: int | None = None,
) -> Call:
    """The launch, without which nothing is computed; others than CUDA's descriptors are for the tests."""
    (m, k), (e, n, _) = a.shape, b.shape
    config = config or config_of(m, e, n, k)
    launch = launcher_of(gemm, config, False, n, k)
    # Groups end inside tiles, at most every one of them; the rows that belong to none are as one more.
    tiles = (m // BLOCK_M.value + min(m, e + 1)) * -(-n // config.block_n)
    programs = min(programs or targets.multiprocessors(a.device), tiles)
    of_a, of_b = describe(a, *box(BLOCK_M.value)), describe(b.view(e * n, k), *box(config.block_n))
    return Call(programs, (of_a, a_scale, of_b, b_scale, None, bias, out, ends, e, m, n, k, programs), launch)
