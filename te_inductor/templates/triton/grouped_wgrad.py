"""``a[:, columns of a group] @ b[:, columns of a group].T`` of FP8 operands, for experts, on Hopper: wgrad. Each group
has a result of its own. The kernel is grouped_kernel.py.

A tile of the result is one program's, so that it is added to a total without atomics."""

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels.grouped_mm import GroupedConfig, cut
from te_inductor.recipes import Gemm
from te_inductor.templates.triton.grouped_kernel import BLOCK_M
from te_inductor.templates.triton.grouped_mm import (
    Describe,
    GroupedLaunch,
    box,
    box_of_scales,
    launcher_of,
)
from te_inductor.templates.triton.launcher import Described


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
    out = a_scale.new_empty(sizes, dtype=out_dtype) if total is None else total
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_() if total is None else out
    prepared(a, a_scale, b, b_scale, starts, out, gemm, total is not None, config).launch()
    return out


def prepared(
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
    programs = programs or targets.multiprocessors(a.device)
    config = config or cut(e * m, n, programs)
    launch = launcher_of(gemm, config, add, m, n)
    programs = min(programs, e * -(-m // BLOCK_M.value) * -(-n // config.block_n))
    scales = describe(b_scale.view(-1, n), box_of_scales()) if gemm.blocked else None
    of_a, of_b = describe(a, box(BLOCK_M.value)), describe(b, box(config.block_n))
    return GroupedLaunch(
        programs, (of_a, a_scale, of_b, b_scale, scales, None, out, starts, e, m, n, p, programs), launch
    )
