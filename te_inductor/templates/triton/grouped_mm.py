"""``a[rows of a group] @ b[group].T`` of FP8 operands, for experts, on Hopper: fprop and dgrad. The kernel is
grouped_kernel.py; wgrad is grouped_wgrad.py.

The sizes of groups are read on the device alone: the grid is as many programs as run at one time, and the number of
tiles is bounded by M and E."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from te_inductor import targets
from te_inductor.kernels.grouped_mm import GroupedConfig, cut, takes
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT, ROW, Scope
from te_inductor.templates.triton.grouped_kernel import BLOCK_K, BLOCK_M, HALF, START_REGISTERS, grouped
from te_inductor.templates.triton.launcher import Box, Described, Launcher

Describe = Callable[[Tensor, Box], Any]


def check(gemm: Gemm, *sizes: int) -> None:
    """Raise where the kernel would compute something else: sites with such sizes are refused before."""
    if not takes(gemm) or any(size % ALIGNMENT for size in sizes):
        raise ValueError(
            f"a grouped {gemm.name} with scales of {gemm.scopes} and sizes {sizes}, expected multiples of {ALIGNMENT} and"
            " scales of tensors, rows, or blocks of 128"
        )


class GroupedLaunch(NamedTuple):
    """A launch of the kernel."""

    programs: int
    arguments: tuple[Any, ...]
    launcher: Launcher

    def launch(self) -> None:
        """Launches on the device of its tensors."""
        self.launcher(self.programs, *self.arguments)


def options() -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": START_REGISTERS}


def constants(gemm: Gemm, config: GroupedConfig, add: bool = False) -> dict[str, Any]:
    """The kernel's, by name."""
    of_a, of_b = (_kind(scope) for scope in gemm.granularities)
    return {
        "BLOCK_N": config.block_n, "STAGES": config.stages, "BAND": config.band, "WGRAD": gemm.name == "wgrad",
        "FAST": gemm.fast_accum and not gemm.blocked, "OF_A": of_a, "OF_B": of_b, "ADD": add,
    }  # fmt: skip


def _kind(scope: Scope) -> int:
    return 2 if scope.blocked else int(scope is ROW)


def launcher_of(gemm: Gemm, config: GroupedConfig, add: bool, *sizes: int) -> Launcher:
    """The launcher of a product of these sizes, which have to be multiples of 16."""
    return _launcher(gemm.name, gemm.fast_accum, gemm.scopes, gemm.elements, config, add, sizes)


@functools.cache  # of fields, as generated code makes a constant anew at each call, and hashing one takes longer
def _launcher(
    name: str,
    fast_accum: bool,
    scopes: tuple[str, str],
    elements: tuple[str, str],
    config: GroupedConfig,
    add: bool,
    sizes: tuple[int, ...],
) -> Launcher:
    gemm = Gemm(name, fast_accum, scopes, elements)
    check(gemm, *sizes)
    return Launcher(grouped, **constants(gemm, config, add), **options())


@functools.cache
def box(rows: int) -> Box:
    """What one copy brings of an operand."""
    return Box([rows, BLOCK_K.value], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))


@functools.cache
def box_of_scales() -> Box:
    """The box of scales of blocks of rows of b."""
    return Box([1, HALF.value], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))


def grouped_mm(
    a: Tensor,  # (M, K) e4m3 or e5m2, rows sorted by group, K a multiple of 16
    a_scale: Tensor,  # fp32: (), (M, 1), or flat of (K/128, M)
    b: Tensor,  # (E, N, K) e4m3 or e5m2, N a multiple of 16
    b_scale: Tensor,  # fp32: (E,), (E, N), or (E, N/128 * K/128)
    ends: Tensor,  # (E,) int32, where the rows of a group end, those of the next begin
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
    out_dtype: torch.dtype,
    config: GroupedConfig | None = None,
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
    config: GroupedConfig | None = None,
    describe: Describe = Described,
    programs: int | None = None,
) -> GroupedLaunch:
    """The launch, without which nothing is computed; others than CUDA's descriptions are for the tests."""
    (m, k), (e, n, _) = a.shape, b.shape
    programs = programs or targets.multiprocessors(a.device)
    config = config or cut(m, n, programs)
    launch = launcher_of(gemm, config, False, n, k)
    # Groups end inside tiles, at most every one of them; the rows that belong to none are as one more.
    tiles = (m // BLOCK_M.value + min(m, e + 1)) * -(-n // config.block_n)
    programs = min(programs, tiles)
    of_a, of_b = describe(a, box(BLOCK_M.value)), describe(b.view(e * n, k), box(config.block_n))
    return GroupedLaunch(programs, (of_a, a_scale, of_b, b_scale, None, bias, out, ends, e, m, n, k, programs), launch)
