"""Experts' products of MXFP8 by the library that torch brings for Blackwell (`torch._scaled_grouped_mm`): traced, so that
Inductor writes what puts scales in its order.

# Note [Scales of groups]
Scales are swizzled, as Note [Swizzled scales] in lowerings/gemm/microscaled_mm.py has it, each group's by themselves:

- fprop and dgrad: those of a group's rows, padded to a multiple of 128; one group's behind another's;
- the weight: each expert's, (E, bytes);
- wgrad: of each operand those of a group's columns, of which Note [Padded groups] makes whole tiles. A group's tiles lie
  behind those of the groups before it, row of tiles by row of tiles.

The library asks nothing of groups' sizes but that wgrad's are multiples of 32. Whether it writes the gradient of an
expert without rows nobody says, so such a group has a tile of zeros. Rows behind the last group it leaves unwritten.

Source: torch, aten/src/ATen/native/cuda/GroupedBlas.cpp, which hands MXFP8 on to MSLK's CUTLASS kernels, and takes bf16
results alone. FP8 with other scales it multiplies on Hopper alone (ScaledGroupMM.cu; 2.13's own tests say so)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import targets
from te_inductor.recipes.formats import E4M3, E8M0, Scope
from te_inductor.recipes.quantizers import Gemm
from te_inductor.runtime import grouped

ROWS, BLOCKS = 128, 4  # of one tile of scales
_BLOCK = 32  # elements of a scale
_QUARTER = ROWS // 4


def multiplies(device: torch.device, gemm: Gemm, *dtypes: torch.dtype) -> bool:
    """Whether the library has a product of what a layer multiplies, of activations and weights in these dtypes."""
    return (
        targets.of(device).grouped_microscaled_mm
        and gemm.microscaled
        and set(gemm.elements) == {E4M3.name}
        and all(scope.scale is E8M0 and scope.block[1] == _BLOCK for scope in gemm.granularities)
        and set(dtypes) == {torch.bfloat16}
    )


def grouped_mm(
    a: Tensor,  # (M, K) e4m3
    a_scale: Tensor,  # as gemm.scopes[0] stores it
    b: Tensor,  # (E, N, K) e4m3
    b_scale: Tensor,  # (E, as gemm.scopes[1] stores it)
    ends: Tensor,  # (E,) int32
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
) -> Tensor:  # (M, N) bf16, zeros behind the last group
    (rows, k), (experts, n, _) = a.shape, b.shape
    of_a, of_b = gemm.granularities
    _, _, source = grouped.layout(ends, rows)
    scales = (
        of_rows(_spread(a_scale.view(1, -1), of_a, rows, k)[0], source),
        of_experts(_spread(b_scale.view(experts, -1), of_b, n, k)),
    )
    y = torch.ops.te_inductor.scaled_grouped_mm(a, b.transpose(1, 2), *scales, ends)
    return grouped.mask_rows(y if bias is None else y + grouped.of_rows(bias.to(y.dtype), ends, rows), ends)


def grouped_wgrad(
    a: Tensor,  # (N, P) e4m3, groups padded, none of them empty
    a_scale: Tensor,
    b: Tensor,  # (K, P), likewise
    b_scale: Tensor,
    starts: Tensor,  # (E + 1,) int32
    tiles: Tensor,  # (P / 128,) int32, whose group each 128 columns are
    gemm: Gemm,
) -> Tensor:  # (E, N, K) bf16
    (n, width), k = a.shape, b.shape[0]
    scales = [
        of_columns(_spread(scale.view(1, -1), scope, rows, width)[0], starts, tiles)
        for scale, scope, rows in zip((a_scale, b_scale), gemm.granularities, (n, k), strict=True)
    ]
    return torch.ops.te_inductor.scaled_grouped_mm(a, b.t(), *scales, starts[1:])  # type: ignore[no-any-return]


def scaled_grouped_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor) -> Tensor:
    """An op, since Inductor would copy the scales to view them as another dtype."""
    a_scale, b_scale = a_scale.view(E8M0.library), b_scale.view(E8M0.library)
    return torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16)


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
    codes: Tensor,  # (R, P / 32)
    starts: Tensor,  # (E + 1,)
    tiles: Tensor,  # (P / 128,)
) -> Tensor:  # (R padded to 128, P / 32)
    pieces = _tiles(codes[None])[0]  # (row of tiles, tile, ...)
    down, across = pieces.shape[:2]
    begins = (starts // ROWS).long()
    place = torch.arange(down * across, device=codes.device)
    group = tiles.long()[place // down]
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
) -> Tensor:  # (E, rows, columns / 32), of rows
    codes = scale.view(scale.shape[0], *scope.scale_matrix(rows, columns))
    return codes if scope.block[0] == 1 else codes.repeat_interleave(scope.block[0], 1)[:, :rows]
