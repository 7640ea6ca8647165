"""Sums over parts of K, which the kernels for few rows leave to whoever reads them: Inductor's code, or `add_up`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.templates.triton.launcher import launcher

ADDED = 512  # elements of a result that a program of `add_up` writes


def sum_dtype(splits: int, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype of what a kernel writes: where there is one part, its sums are the result."""
    return torch.float32 if splits > 1 else out_dtype


def add_up(
    parts: Tensor,  # (splits, M, N)
    out_dtype: torch.dtype,
    assembly: bool = True,
) -> Tensor:  # (M, N)
    """What Inductor's code does where it reads them."""
    splits, m, n = parts.shape
    if splits == 1:
        return parts[0].to(out_dtype)
    out = parts.new_empty((m, n), dtype=out_dtype)
    run = launcher(_add_up, SPLITS=splits, BLOCK=ADDED, ASSEMBLY=assembly, num_warps=4, launch_pdl=assembly)
    run(triton.cdiv(m * n, ADDED), parts, out, m * n)
    return out


@triton.jit
def _add_up(
    parts,  # (SPLITS, SIZE) fp32
    out,  # (SIZE,)
    SIZE,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = parts + place
    y = tl.load(part, mask=place < SIZE)
    for _ in tl.static_range(1, SPLITS):
        part += SIZE
        y += tl.load(part, mask=place < SIZE)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=place < SIZE)
