"""``a[rows of a group] @ b[group].T`` of FP8 operands, for experts, on Hopper: fprop and dgrad; and of wgrad ``a[:, columns
of a group] @ b[:, columns of a group].T``, where each group has a result of its own, a tile of which is one program's,
so that it is added to a total without atomics. The kernel is grouped_kernel.py.

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
from te_inductor.templates.triton.launcher import Box, Described, Launcher, empty

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


class _Launch(NamedTuple):
    """What a launch does with operands of some sizes, whatever their addresses."""

    launcher: Launcher
    programs: int
    of_a: Box
    of_b: Box


@functools.lru_cache(4096)  # of fields, as eager code makes a constant anew at each call, and hashing one takes longer
def _plan(
    name: str,
    fast_accum: bool,
    scopes: tuple[str, str],
    elements: tuple[str, str],
    config: GroupedConfig | None,  # else the one for these sizes
    add: bool,
    groups: int,
    m: int,
    n: int,
    k: int,  # 0 of a wgrad, which contracts whatever number of columns
    programs: int,  # at most
) -> _Launch:
    of_groups = name == "wgrad"  # whether each has rows of its own
    check(Gemm(name, fast_accum, scopes, elements), n, m if of_groups else k)
    config = config or cut(groups * m if of_groups else m, n, programs)
    # Groups end inside tiles, at most every one of them; the rows that belong to none are as one more.
    down = groups * -(-m // BLOCK_M.value) if of_groups else m // BLOCK_M.value + min(m, groups + 1)
    launcher = _launcher(name, fast_accum, scopes, elements, config, add)
    return _Launch(launcher, min(programs, down * -(-n // config.block_n)), box(BLOCK_M.value), box(config.block_n))


@functools.cache  # for all sizes
def _launcher(
    name: str, fast_accum: bool, scopes: tuple[str, str], elements: tuple[str, str], config: GroupedConfig, add: bool
) -> Launcher:
    return Launcher(grouped, **constants(Gemm(name, fast_accum, scopes, elements), config, add), **options())


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
    out = empty(a_scale, (a.shape[0], b.shape[1]), out_dtype)
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
    most = programs or targets.multiprocessors(a.device)
    launch, programs, box_of_a, box_of_b = _plan(
        gemm.name, gemm.fast_accum, gemm.scopes, gemm.elements, config, False, e, m, n, k, most
    )
    of_a, of_b = describe(a, box_of_a), describe(b, box_of_b)
    return GroupedLaunch(programs, (of_a, a_scale, of_b, b_scale, None, bias, out, ends, e, m, n, k, programs), launch)


def grouped_wgrad(
    a: Tensor,  # (N, P) e4m3 or e5m2: dy transposed, each group's columns padded with zeros to a multiple of 128
    a_scale: Tensor,  # fp32: (), (E, N), or flat of (P/128, N)
    b: Tensor,  # (K, P): x transposed, padded alike
    b_scale: Tensor,  # (), (E, K), or flat of (P/128, K)
    starts: Tensor,  # (E + 1,) int32, where the columns of a group begin, and those of the last end; multiples of 128
    gemm: Gemm,
    out_dtype: torch.dtype,
    total: Tensor | None = None,  # (E, N, K) fp32, which the product is added to
    config: GroupedConfig | None = None,
) -> Tensor:  # (E, N, K), or the total
    """``(a * a_scale)[:, columns of g] @ (b * b_scale)[:, columns of g].T``; of an empty group zeros."""
    sizes = starts.shape[0] - 1, a.shape[0], b.shape[0]
    out = empty(a_scale, sizes, out_dtype) if total is None else total
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_() if total is None else out
    prepared_wgrad(a, a_scale, b, b_scale, starts, out, gemm, total is not None, config).launch()
    return out


def prepared_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    starts: Tensor,
    out: Tensor,
    gemm: Gemm,
    add: bool,
    config: GroupedConfig | None = None,
    describe: Describe = Described,
    programs: int | None = None,
) -> GroupedLaunch:
    """Makes the launch as that of `grouped_mm` is made."""
    (m, p), n, e = a.shape, b.shape[0], starts.shape[0] - 1
    most = programs or targets.multiprocessors(a.device)
    launch, programs, box_of_a, box_of_b = _plan(
        gemm.name, gemm.fast_accum, gemm.scopes, gemm.elements, config, add, e, m, n, 0, most
    )
    scales = describe(b_scale.view(-1, n), box_of_scales()) if gemm.blocked else None
    of_a, of_b = describe(a, box_of_a), describe(b, box_of_b)
    return GroupedLaunch(
        programs, (of_a, a_scale, of_b, b_scale, scales, None, out, starts, e, m, n, p, programs), launch
    )
