"""Experts' products of MXFP8, MXFP4 and NVFP4 by the library that torch brings for Blackwell
(`torch._scaled_grouped_mm`, and its second version for four bits): traced, so that Inductor writes what puts scales in
its order.

# Note [Scales of groups]
Scales are swizzled, as Note [Swizzled scales] in lowerings/gemm/microscaled_mm.py has it, each group's by themselves:

- fprop and dgrad: those of a group's rows, padded to a multiple of 128; one group's behind another's;
- the weight: each expert's, (E, bytes);
- wgrad: of each operand those of a group's columns, of which Note [Padded groups] makes whole tiles. A group's tiles lie
  behind those of the groups before it, row of tiles by row of tiles.

NVFP4's factors are one a group, which multiplies that group's sums in fp32: the product of two tensors, an element of
each a group. The first holds `alpha`, the second ones. Factors of rows multiply what was rounded to bf16.

The library asks nothing of groups' sizes but that wgrad's are multiples of a scale's elements. Whether it writes the
gradient of an expert without rows nobody says, so such a group has a tile of zeros. Rows behind the last group it leaves
unwritten.

Source: torch, aten/src/ATen/native/cuda/GroupedBlas.cpp, which hands both on to MSLK's CUTLASS kernels (mx8mx8bf16_grouped,
f4f4bf16_grouped; include/mslk/gemm/cutlass/grouped_common.cuh has the places of a group's operands), and takes bf16
results alone. Offsets count elements, also where two are a byte. FP8 with other scales it multiplies on Hopper alone
(ScaledGroupMM.cu; 2.13's own tests say so). torch 2.13 has no fake kernel of the second version, which programs that
leave the process would be traced through."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from te_inductor.recipes.formats import Scope
from te_inductor.recipes.quantizers import Gemm
from te_inductor.runtime.eager import grouped

ROWS, BLOCKS = 128, 4  # of one tile of scales
_QUARTER = ROWS // 4
_BLOCKWISE = {16: ScalingType.BlockWise1x16, 32: ScalingType.BlockWise1x32}  # by the elements of a scale
_SWIZZLES = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE  # of blocks' scales, of factors


def grouped_mm(
    a: Tensor,  # (M, K), as stored
    a_scale: Tensor,  # as gemm.scopes[0] stores it
    b: Tensor,  # (E, N, K)
    b_scale: Tensor,  # (E, as gemm.scopes[1] stores it)
    ends: Tensor,  # (E,) int32
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
    alpha: Tensor | None = None,  # () or (M, 1), factor of the product, of two-level scales
) -> Tensor:  # (M, N) bf16, zeros behind the last group
    rows, (experts, n, stored) = a.shape[0], b.shape
    k, (of_a, of_b) = stored * gemm.packed, gemm.granularities
    _, _, source = grouped.layout(ends, rows)
    scales = (
        of_rows(_spread(a_scale.view(1, -1), of_a, rows, k)[0], source),
        of_experts(_spread(b_scale.view(experts, -1), of_b, n, k)),
    )
    y = _product(a, b.transpose(1, 2), *scales, ends, gemm, alpha)
    return grouped.mask_rows(y if bias is None else y + grouped.of_rows(bias.to(y.dtype), ends, rows), ends)


def grouped_wgrad(
    a: Tensor,  # (N, P), groups padded, none of them empty
    a_scale: Tensor,
    b: Tensor,  # (K, P), likewise
    b_scale: Tensor,
    starts: Tensor,  # (E + 1,) int32
    tiles: Tensor,  # (P / 128,) int32, whose group each 128 columns are
    gemm: Gemm,
    alpha: Tensor | None = None,  # () or (1, K)
) -> Tensor:  # (E, N, K) bf16
    width = a.shape[1] * gemm.packed
    scales = [
        of_columns(_spread(scale.view(1, -1), scope, x.shape[0], width)[0], starts, tiles, scope.block[1])
        for x, scale, scope in zip((a, b), (a_scale, b_scale), gemm.granularities, strict=True)
    ]
    return _product(a, b.t(), scales[0], scales[1], starts[1:], gemm, alpha)


def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, gemm: Gemm, alpha: Tensor | None
) -> Tensor:
    if alpha is None:
        return torch.ops.te_inductor.scaled_grouped_mm(a, b, [a_scale], [b_scale], ends, gemm)  # type: ignore[no-any-return]
    ones = torch.ones(ends.shape[0], device=a.device, dtype=torch.float32)
    factor = ones if alpha.dim() else alpha.expand(ends.shape[0]).contiguous()
    y = torch.ops.te_inductor.scaled_grouped_mm(a, b, [a_scale, factor], [b_scale, ones], ends, gemm)
    return (y * alpha).to(y.dtype) if alpha.dim() else y


def scaled_grouped_mm(
    a: Tensor,  # (M, K), or (N, P), low precision
    b: Tensor,  # (E, K, N), or (P, K), columns contiguous
    a_scale: list[Tensor],  # uint8, of two dimensions, and of two-level scales (E,) fp32, factors of each group
    b_scale: list[Tensor],
    ends: Tensor,  # (E,) int32, of groups of rows of a, or of columns of both
    gemm: Gemm,
) -> Tensor:  # bf16 (M, N), or (E, N, K)
    """An op, since Inductor would copy the scales to view them as another dtype."""
    of_a, of_b = gemm.granularities
    a, b = a.view(gemm.formats[0].library), b.view(gemm.formats[1].library)
    a_scale = [a_scale[0].view(of_a.scale.library), *a_scale[1:]]
    b_scale = [b_scale[0].view(of_b.scale.library), *b_scale[1:]]
    bf16 = torch.bfloat16
    if gemm.packed == 1:
        return torch._scaled_grouped_mm(a, b, a_scale[0], b_scale[0], offs=ends, out_dtype=bf16)
    recipe, swizzle = (
        [int(one.value) for one in each[: len(a_scale)]]
        for each in ((_BLOCKWISE[of_a.block[1]], ScalingType.TensorWise), _SWIZZLES)
    )
    return torch._scaled_grouped_mm_v2(
        a, b, a_scale, recipe, swizzle, b_scale, recipe, swizzle, offs=ends, out_dtype=bf16
    )


def of_rows(
    codes: Tensor,  # (M, C) uint8
    source: Tensor,  # (P,) int32, the row at each place of groups that are padded to 128 rows, -1 of padding
) -> Tensor:  # (P, C padded to 4)
    tiles = _tiles(grouped.gather_padded(codes, source)[None])
    return tiles.view(source.shape[0], -1)


def of_experts(
    codes: Tensor,  # (E, R, C)
) -> Tensor:  # (E, bytes)
    return _tiles(codes).flatten(1)


def of_columns(
    codes: Tensor,  # (R, P / wide)
    starts: Tensor,  # (E + 1,)
    tiles: Tensor,  # (P / 128,)
    wide: int,  # elements of a scale
) -> Tensor:  # (R padded to 128, P / wide)
    pieces = _tiles(codes[None])[0]  # (row of tiles, tile, ...)
    down, across = pieces.shape[:2]
    each = grouped.GROUP_ALIGNMENT // (wide * BLOCKS)  # tiles of scales in the columns that a group is padded to
    begins = starts.long() // (wide * BLOCKS)
    place = torch.arange(down * across, device=codes.device)
    group = tiles.long()[place // (down * each)]
    first, count = begins[group], (begins[1:] - begins[:-1])[group]
    inside = place - down * first
    row, column = (inside // count).clamp(max=down - 1), (first + inside % count).clamp(max=across - 1)
    return pieces[row, column].view(down * ROWS, across * BLOCKS)


def _tiles(
    codes: Tensor,  # (E, R, C)
) -> Tensor:  # (E, R / 128, C / 4, 32, 4, 4), in the order of memory
    experts, rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % BLOCKS, 0, -rows % ROWS))
    codes = codes.view(experts, codes.shape[1] // ROWS, ROWS // _QUARTER, _QUARTER, codes.shape[2] // BLOCKS, BLOCKS)
    return codes.permute(0, 1, 4, 3, 2, 5).contiguous()


def _spread(
    scale: Tensor,  # (E, as the scope stores it)
    scope: Scope,
    rows: int,
    columns: int,
) -> Tensor:  # (E, rows, columns / a scale's) uint8, of rows
    codes = scale.view(torch.uint8).view(scale.shape[0], *scope.scale_matrix(rows, columns))
    return codes if scope.block[0] == 1 else codes.repeat_interleave(scope.block[0], 1)[:, :rows]
