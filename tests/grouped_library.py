"""Grouped products of torch's library on Blackwell, on the CPU: operands, scales and factors are read where the library
reads them, with the documented order of scales written down apart from the code that it checks. All that they are given
passes torch's own checks of sizes and strides: its fake kernel's, or where it has none those of GroupedBlas.cpp and of
MSLK's host code."""

import torch
from torch import Tensor

from te_inductor.numerics import microscaling
from te_inductor.numerics.algebra import TORCH
from te_inductor.numerics.arithmetic import e8m0_value
from te_inductor.recipes.formats import E2M1


def place(row: Tensor, block: Tensor, blocks: int) -> Tensor:
    """The place where cuBLAS's documentation has the scale of a row and a block of a matrix with so many blocks a
    row."""
    across = -(-blocks // 4)
    return (row // 128 * across + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def read(stored: Tensor, base: int, rows: int, blocks: int) -> Tensor:
    """Values of a matrix of scales that begins there."""
    index = place(torch.arange(rows)[:, None], torch.arange(blocks)[None, :], blocks)
    codes = stored.view(torch.uint8).flatten()[base + index]
    return e8m0_value(TORCH, codes) if stored.dtype == torch.float8_e8m0fnu else codes.view(stored.dtype).float()


def up(size: int, to: int) -> int:
    return -(-size // to) * to


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_grouped_mm`."""
    shapes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, a_scale, b_scale)]
    torch.ops.aten._scaled_grouped_mm(*shapes, offs.to("meta"), out_dtype=out_dtype)
    wide = [x.float() for x in (a, b.transpose(-1, -2))]
    return of_groups(*wide, a_scale, b_scale, offs, 32, torch.ones(len(offs))).to(out_dtype)


def product_of_four_bits(
    a: Tensor,
    b: Tensor,
    a_scales: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    b_scales: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """`torch._scaled_grouped_mm_v2`, which has no fake kernel: the checks of its host code, and MSLK's."""
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and out_dtype == torch.bfloat16
    assert a.is_contiguous() and b.transpose(-1, -2).is_contiguous()
    assert a.shape[-1] == b.shape[-2] and not any(size % 16 for size in (a.shape[-1], *b.shape[-2:]))
    assert offs.dtype == torch.int32 and offs.dim() == 1
    two_level = len(a_scales) == 2
    dtype, wide, recipe = (torch.float8_e4m3fn, 16, [2, 0]) if two_level else (torch.float8_e8m0fnu, 32, [3])
    assert recipe_a == recipe_b == recipe and swizzle_a == swizzle_b == [1, 0][: len(recipe)]
    (a_scale, *a_factor), (b_scale, *b_factor) = a_scales, b_scales
    assert a_scale.dtype == b_scale.dtype == dtype and a_scale.is_contiguous() and b_scale.is_contiguous()
    assert a_scale.dim() == 2 and a_scale.shape[0] >= a.shape[0]
    if b.dim() == 3:
        assert b_scale.shape == (len(b), up(2 * b.shape[1] // wide, 4) * up(b.shape[2], 128))
    else:
        assert b_scale.dim() == 2 and b_scale.shape[0] >= b.shape[1]
    factor = torch.ones(len(offs))
    if two_level:
        assert a_factor[0].dtype == b_factor[0].dtype == torch.float32
        factor = a_factor[0].mul(b_factor[0])
        assert factor.shape == offs.shape and factor.is_contiguous()
    values = [
        microscaling.values(x.contiguous().view(torch.uint8).flatten(0, -2), E2M1) for x in (a, b.transpose(-1, -2))
    ]
    values[1] = values[1].view(*b.transpose(-1, -2).shape[:-1], -1)
    return of_groups(*values, a_scale, b_scale, offs, wide, factor).to(out_dtype)


def of_groups(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, wide: int, factor: Tensor
) -> Tensor:
    """The products of (M, K) and (E, N, K), or (M, K) and (N, K), with a scale for so many elements; what the library
    leaves unwritten is NaN."""
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[0])
    y, begin, base = torch.full(shape, torch.nan), 0, [0, 0]
    for group, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            blocks, rows = a.shape[1] // wide, end - begin
            left, right = read(a_scale, base[0], rows, blocks), read(b_scale[group], 0, b.shape[1], blocks)
            base[0] += up(rows, 128) * up(blocks, 4)
            pair = a[begin:end], b[group]
        else:
            assert end > begin, "an empty group, whose gradient nobody writes"
            assert (end - begin) % wide == 0
            blocks = (end - begin) // wide
            left, right = (read(*x, blocks) for x in ((a_scale, base[0], a.shape[0]), (b_scale, base[1], b.shape[0])))
            base[0] += up(a.shape[0], 128) * up(blocks, 4)
            base[1] += up(b.shape[0], 128) * up(blocks, 4)
            assert base[0] <= a_scale.numel() and base[1] <= b_scale.numel()
            pair = a[:, begin:end], b[:, begin:end]
        scaled = [x * scale.repeat_interleave(wide, 1) for x, scale in zip(pair, (left, right), strict=True)]
        where = y[begin:end] if b.dim() == 3 else y[group]
        torch.mm(scaled[0], scaled[1].t(), out=where)
        where *= factor[group]
        begin = end
    return y
