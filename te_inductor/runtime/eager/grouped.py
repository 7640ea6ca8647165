"""Grouped products on real tensors, in plain torch: what runs on a CPU, and on a GPU without a kernel for them
(templates/triton/grouped_ops.py registers those).

A grouped product multiplies each row of `a` by the matrix of the row's group, one of E. Rows of a group stand together;
`ends` says where each group ends, and what lies behind the last end belongs to none. Sizes of groups are known to the
device alone: nothing here reads them on the host, but for a CPU, where that waits for nobody.

# Note [Padded groups]
wgrad sums over the rows of a group. Its operands are stored transposed, with rows along the contraction, so each group
begins at a multiple of `GROUP_ALIGNMENT` columns and is filled with zeros up to the next. Then a tile of the GEMM never
holds two groups, scales of blocks along the contraction belong to one, and loads are aligned. The width is
`padded_width(rows, groups)` whatever the groups' sizes are, so that it is known before they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from te_inductor.numerics import blocks
from te_inductor.recipes.formats import E4M3, ROW, Scope, padded
from te_inductor.recipes.quantizers import Gemm, Quantizer
from te_inductor.runtime.eager import Written, dense

GROUP_ALIGNMENT = 128  # columns; what a tile of the GEMM holds, and a multiple of every scope's block


def padded_width(rows: int, groups: int) -> int:
    """Columns of a padded transpose: enough for any sizes of so many groups with so many rows in all."""
    return padded(rows, GROUP_ALIGNMENT) + groups * GROUP_ALIGNMENT


def is_written_out(device: torch.device, gemm: Gemm) -> bool:
    """Whether `written_out_mm` multiplies on this device."""
    return device.type != "cuda" or gemm.microscaled or (not gemm.blocked and set(gemm.elements) == {E4M3.name})


def grouped_mm(
    a: Tensor,  # (M, K), low precision, rows sorted by group
    a_scale: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (E, N, K), low precision
    b_scale: Tensor,  # (E,), (E, N), or (E, what gemm.scopes[1] stores of one expert)
    ends: Tensor,  # (E,) int32, where each group ends
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # () or (M, 1), factor of the product, of two-level scales
) -> Tensor:  # (M, N), zeros behind the last group
    wide_a, wide_b = _values(a, a_scale, gemm, 0), _each_values(b, b_scale, gemm)
    with _plain(a.device):
        if a.device.type == "cuda":
            y = torch._grouped_mm(wide_a.bfloat16(), wide_b.bfloat16().transpose(1, 2), offs=ends).float()
        else:
            y, begin = wide_a.new_zeros((a.shape[0], b.shape[1])), 0
            for group, end in enumerate(ends.tolist()):
                torch.mm(wide_a[begin:end], wide_b[group].t(), out=y[begin:end])
                begin = end
    return _finished(y, alpha, out_dtype, bias, ends)


@contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """Leaves out what may be around the op: the user's autocast, and autograd, which a lowered step may run in."""
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        yield


def written_out_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,
) -> Tensor:
    """The same in ATen ops, none of which tells the host a group's size: on CUDA torch's grouped products, in bf16; on a
    CPU, where torch traces them in bf16 alone, each expert multiplies all rows in fp32."""
    if a.device.type == "cuda" and not gemm.blocked:
        by_row, by_column = a_scale.reshape(-1).expand(a.shape[0]), b_scale.view(b.shape[0], -1).expand(b.shape[:2])
        y = torch._scaled_grouped_mm(
            *(a, b.transpose(1, 2), by_row.contiguous(), by_column.contiguous()),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=gemm.fast_accum,
        ).float()
    else:
        wide_a, wide_b = _values(a, a_scale, gemm, 0), _each_values(b, b_scale, gemm).transpose(1, 2)
        if a.device.type == "cuda":
            y = torch._grouped_mm(wide_a.bfloat16(), wide_b, offs=ends).float()
        else:
            y = torch.bmm(wide_a.expand(b.shape[0], -1, -1), wide_b)
            y = y[group_of_rows(ends, a.shape[0]), torch.arange(a.shape[0], device=a.device)]
    return _finished(y, alpha, out_dtype, bias, ends)


def _finished(y: Tensor, alpha: Tensor | None, out_dtype: torch.dtype, bias: Tensor | None, ends: Tensor) -> Tensor:
    y = (y if alpha is None else y * alpha).to(out_dtype)
    return mask_rows(y if bias is None else y + of_rows(bias.to(out_dtype), ends, y.shape[0]), ends)


def grouped_wgrad(
    a: Tensor,  # (N, P), dy, groups padded
    a_scale: Tensor,  # (), (E, N) of rows, or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (K, P), x, likewise
    b_scale: Tensor,  # (), (E, K), or of the shape that gemm.scopes[1] stores
    starts: Tensor,  # (E + 1,) int32, where each group begins
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # ()
) -> Tensor:  # (E, N, K)
    wide_a, wide_b = _values(a, a_scale, gemm, 0), _values(b, b_scale, gemm, 1)
    with _plain(a.device):
        if a.device.type == "cuda":
            y = torch._grouped_mm(wide_a.bfloat16(), wide_b.bfloat16().t(), offs=starts[1:]).float()
        else:
            y = wide_a.new_empty((len(starts) - 1, a.shape[0], b.shape[0]))
            begin, *ends = starts.tolist()
            for group, end in enumerate(ends):
                torch.mm(wide_a[:, begin:end], wide_b[:, begin:end].t(), out=y[group])
                begin = end
    if gemm.granularities[0] is ROW:
        y = y * (a_scale[:, :, None] * b_scale[:, None, :])
    return (y if alpha is None else y * alpha).to(out_dtype)


def accumulate_grouped_wgrad(
    totals: list[Written],  # fp32, (E, N, K) of each parameter
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    starts: Tensor,
    alpha: Tensor | None,
    gemm: Gemm,
) -> None:
    """Adds through `data`, so that autograd does not see the totals change: several microbatches' backwards hold
    them."""
    dw = torch.ops.te_inductor.grouped_wgrad(a, a_scale, b, b_scale, starts, gemm, torch.float32, alpha)
    for total, gradient in zip(totals, dw.split([total.shape[1] for total in totals], 1), strict=True):
        total.data.add_(gradient)


def _values(x: Tensor, scale: Tensor, gemm: Gemm, operand: int) -> Tensor:
    """What a matrix stands for, (R, C) fp32; of wgrad's operands with a scale a row of each group without it."""
    scope = gemm.granularities[operand]
    if gemm.name == "wgrad" and scope is ROW:
        return x.float()
    return blocks.values(x, scale, gemm.formats[operand], scope)


def _each_values(x: Tensor, scale: Tensor, gemm: Gemm) -> Tensor:  # (E, R, C) fp32, on CUDA bf16
    element, scope = gemm.formats[1], gemm.granularities[1]
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if not scope.blocked:
        return (x.float() * scale.reshape(x.shape[0], -1, 1)).to(dtype)
    return torch.stack([blocks.values(*one, element, scope).to(dtype) for one in zip(x, scale, strict=True)])


def quantize_experts(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32, of all, where scales have two levels
    transposed: bool = False,  # casts each matrix's transpose
) -> tuple[Tensor, Tensor]:  # data (E, R, pad(C)), scale_inv
    pairs = [dense.quantize(matrix, quantizer, amax) for matrix in (w.transpose(1, 2) if transposed else w)]
    with torch.autocast(w.device.type, enabled=False):  # which would choose a dtype for what is stacked
        data, scale_inv = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return data, scale_inv.squeeze(2) if quantizer.granularity is ROW else scale_inv


def quantize_experts_delayed(
    w: Tensor,  # (E, R, C)
    scale: Tensor,  # (), (E,), or (E, C) of the transposes' rows
    quantizer: Quantizer,
    transposed: bool = False,
) -> Tensor:  # (E, R, pad(C)), or of the transposes
    matrices = w.transpose(1, 2) if transposed else w
    missing = quantizer.padded(matrices.shape[2]) - matrices.shape[2]
    matrices = F.pad(matrices, (0, missing)) if missing else matrices
    scale = scale.unsqueeze(2) if scale.dim() == 2 else scale.view(-1, 1, 1)
    return dense.cast(matrices, scale, quantizer).contiguous()


def quantize_experts_rows(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,  # of rows
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (E, R, pad(C)), scale_inv (E, R); columns' scale, scale_inv (E, C)
    scale = dense.encode_scale(w.abs().amax(1).float(), quantizer, w.dtype)
    return *quantize_experts(w, quantizer), scale, 1.0 / scale


def experts_scale(
    weights: list[Tensor],  # each (E, R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # scale (E,), scale_inv (E,); of each expert's matrices together
    amaxes = [weight.abs().amax((1, 2)).float() for weight in weights]
    scale = dense.encode_scale(torch.stack(amaxes).amax(0), quantizer, weights[0].dtype)
    return scale, 1.0 / scale


def quantize_groups(
    x: Tensor,  # (R, C)
    source: Tensor,  # (P,) int32, the row that each column of the copy holds, -1 of padding
    tiles: Tensor,  # (P / 128,) int32, whose group each 128 columns are
    starts: Tensor,  # (E + 1,) int32, where groups begin, and the last one ends
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (C, P), scale_inv (E, C) of rows, or of the scope's shape for (C, P)
    whole = gather_padded(x, source)
    if quantizer.granularity is not ROW:
        return dense.quantize(whole.t(), quantizer)
    amax = whole.abs().view(tiles.shape[0], GROUP_ALIGNMENT, -1).amax(1).float()
    index = tiles.long()[:, None].expand_as(amax)
    amax = amax.new_zeros((len(starts) - 1, amax.shape[1])).scatter_reduce(0, index, amax, "amax")
    scale = dense.encode_scale(amax, quantizer, x.dtype)
    each = scale[tiles].repeat_interleave(GROUP_ALIGNMENT, 0)
    return dense.cast(whole, each, quantizer).t().contiguous(), 1.0 / scale


def transpose_groups(
    data: Tensor,  # (R, C), of one byte an element
    source: Tensor,  # (P,) int32
) -> Tensor:  # (C, P)
    return gather_padded(data.view(torch.uint8), source).t().contiguous().view(data.dtype)


def gather_padded(x: Tensor, source: Tensor) -> Tensor:  # (P, C)
    """The rows of `x` at `source`, zeros where that is negative."""
    if not guard_or_false(x.shape[0] > 0):  # a rank without rows: torch would look at the first one
        x = torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
    return torch.where((source >= 0)[:, None], x[source.clamp(min=0)], torch.zeros((), dtype=x.dtype, device=x.device))


def mask_rows(x: Tensor, ends: Tensor) -> Tensor:
    """`x` with zeros for rows that belong to no group, whatever they hold."""
    inside = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(inside[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def mask_copy(data: Tensor, ends: Tensor) -> Tensor:
    """`mask_rows` of a row copy, of whose format no device has a `where`."""
    return mask_rows(data.view(torch.uint8), ends).view(data.dtype)


def equal_groups(like: Tensor, groups: int, rows: int | torch.SymInt) -> Tensor:  # (groups,)
    """Returns where groups of `rows` rows each end, on the device of `like`."""
    return torch.arange(1, groups + 1, device=like.device, dtype=torch.int32) * rows  # type: ignore[return-value]


def group_of_rows(ends: Tensor, rows: int) -> Tensor:  # (rows,) int64
    """The group of each row, the last one for those behind all."""
    places = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return (places[:, None] >= ends[None, :]).sum(1).clamp(max=ends.shape[0] - 1)


def of_rows(values: Tensor, ends: Tensor, rows: int) -> Tensor:  # (rows, ...)
    """What belongs to each row's group."""
    return values[group_of_rows(ends, rows)]


def layout(ends: Tensor, rows: int, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Finds where groups stand in a padded transpose: Note [Padded groups]; each has at least so many columns.

    Returns:
        starts (E + 1,), where each group begins, and the last one ends; tiles (P / 128,), the group of each 128 columns;
        source (P,), the row that each column holds, -1 of padding. All int32."""
    groups, width = ends.shape[0], padded_width(rows, ends.shape[0])
    begins = F.pad(ends, (1, 0))[:-1]
    sizes = (ends - begins + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    starts = F.pad((sizes.clamp(min=least) if least else sizes).cumsum(0), (1, 0))
    first = torch.arange(width // GROUP_ALIGNMENT, device=ends.device) * GROUP_ALIGNMENT
    group = (first[:, None] >= starts[None, 1:]).sum(1)
    tiles = group.clamp(max=groups - 1)
    inside = torch.arange(GROUP_ALIGNMENT, device=ends.device)
    row = (first - starts[tiles] + begins[tiles])[:, None] + inside[None, :]
    known = (group < groups)[:, None] & (row < ends[tiles][:, None])
    return starts.int(), tiles.int(), torch.where(known, row, -1).flatten().int()


def gather_scales(scale_inv: Tensor, scope: Scope, rows: Tensor, shape: torch.Size) -> Tensor:
    """Scales of the rows that are picked of a copy (R, C), of which the scope's blocks are no higher than a row."""
    if not scope.blocked:
        return scale_inv[rows] if scale_inv.dim() else scale_inv
    matrix = scale_inv.view(scope.scale_matrix(*shape))
    return (matrix[:, rows] if scope.row_last else matrix[rows]).flatten()
