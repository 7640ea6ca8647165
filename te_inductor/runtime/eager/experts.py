"""Products with the stored weights of experts, on real tensors and in plain torch. A stored weight has E matrices (N,
K); rows of x either stand together by expert, `ends` being where each expert's end, or each has the number of its
own, `ids`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from te_inductor.numerics import blocks, nvfp4
from te_inductor.recipes.formats import ROW
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime.eager import grouped


def nvfp4_product(
    x: Tensor,  # (M, K)
    ends: Tensor | None,  # (E,) int32
    ids: Tensor | None,  # (M,); one of the two
    stored: Tensor,  # (E, N, K/2)
    block_scale: Tensor,  # (E, N, K/16)
    tensor_scale: Tensor,  # (E,)
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N), zeros for rows of no expert
    """``(x[m] @ values[e].T) * tensor_scale[e]``, e being the expert of row m, the sum in fp32."""

    def product(rows: Tensor, expert: int) -> Tensor:
        wide = nvfp4.values(stored[expert], block_scale[expert])[:, : rows.shape[1]]
        return (rows @ wide.t()) * tensor_scale[expert]

    whole = partial(nvfp4_dequantize, stored, block_scale, tensor_scale, x.shape[1], x.dtype)
    return _product(x, ends, ids, stored.shape, product, whole, out_dtype)


def fp8_product(
    x: Tensor,  # (M, K)
    ends: Tensor | None,
    ids: Tensor | None,
    values: Tensor,  # (E, N, K padded)
    scale_inv: Tensor,  # (E,), (E, N), or (E, what the scope stores of one expert)
    quantizer: Quantizer,
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N)
    """``x[m] @ w[e].T``, x as it is, the sum in fp32."""

    def product(rows: Tensor, expert: int) -> Tensor:
        wide = _matrix(values[expert], scale_inv[expert], quantizer)
        return rows @ wide[:, : rows.shape[1]].t()

    whole = partial(fp8_dequantize, values, scale_inv, quantizer, x.shape[1], x.dtype)
    return _product(x, ends, ids, values.shape, product, whole, out_dtype)


def plain_product(
    x: Tensor,  # (M, K)
    ends: Tensor,  # (E,) int32
    whole: Tensor,  # (E, N, K)
) -> Tensor:  # (M, N)
    def product(rows: Tensor, expert: int) -> Tensor:
        return rows @ whole[expert].float().t()

    return _product(x, ends, None, whole.shape, product, lambda: whole, x.dtype)


def nvfp4_dequantize(
    stored: Tensor,  # (E, N, K/2)
    block_scale: Tensor,  # (E, N, K/16)
    tensor_scale: Tensor,  # (E,)
    k: int | torch.SymInt,
    dtype: torch.dtype,
) -> Tensor:  # (E, N, k)
    """Expert by expert, so that no more than one is in fp32."""
    whole = stored.new_empty((*stored.shape[:2], k), dtype=dtype)
    for place, parts in enumerate(zip(stored, block_scale, tensor_scale, strict=True)):
        whole[place] = nvfp4.dequantize(*parts, k, dtype)
    return whole


def fp8_dequantize(
    values: Tensor,  # (E, N, K padded)
    scale_inv: Tensor,
    quantizer: Quantizer,
    k: int | torch.SymInt,
    dtype: torch.dtype,
) -> Tensor:  # (E, N, k)
    whole = values.new_empty((*values.shape[:2], k), dtype=dtype)
    for place, parts in enumerate(zip(values, scale_inv, strict=True)):
        whole[place] = _matrix(*parts, quantizer)[:, :k].to(dtype)
    return whole


def product_of_whole(
    x: Tensor, ends: Tensor | None, ids: Tensor | None, whole: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiplies on a GPU by torch's own grouped product; sizes of groups stay on the device."""

    def product(rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows.to(whole.dtype), whole.transpose(1, 2), offs=ends).to(out_dtype)

    if ends is None:
        return sorted_product(x, ids, whole.shape[0], product)
    return grouped.mask_rows(product(x, ends), ends)


def sorted_product(x: Tensor, ids: Tensor | None, experts: int, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The product of rows of any order, by one of rows that stand by expert and of where each expert's end."""
    assert ids is not None
    order, ends = sorted_by_expert(ids, experts)
    y = product(x[order], ends)
    return torch.empty_like(y).index_copy_(0, order, y)


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Finds which row stands at each place when rows stand by expert, (M,), and where each expert's end, (E,) int32.
    Negative numbers count from the last expert on."""
    numbers, order = torch.sort(torch.where(ids < 0, ids + experts, ids), stable=True)
    wanted = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    return order, torch.searchsorted(numbers, wanted, right=True).int()


def _matrix(values: Tensor, scale_inv: Tensor, quantizer: Quantizer) -> Tensor:  # (N, K) fp32
    scope = quantizer.granularity
    return blocks.values(values, scale_inv[:, None] if scope is ROW else scale_inv, quantizer.format, scope)


def _product(
    x: Tensor,
    ends: Tensor | None,
    ids: Tensor | None,
    sizes: Sequence[int],  # E, N, and more
    product: Callable[[Tensor, int], Tensor],  # of rows in fp32, and of an expert
    whole: Callable[[], Tensor],  # (E, N, K), for a GPU
    out_dtype: torch.dtype,
) -> Tensor:
    if x.device.type == "cuda":
        return product_of_whole(x, ends, ids, whole(), out_dtype)
    experts, n, *_ = sizes
    y = x.new_zeros((x.shape[0], n), dtype=out_dtype)
    with torch.autocast(x.device.type, enabled=False):  # the op may run inside the user's autocast region
        for expert, rows in _rows(ends, ids, experts):
            y[rows] = product(x[rows].float(), expert).to(out_dtype)
    return y


def _rows(ends: Tensor | None, ids: Tensor | None, experts: int) -> Iterator[tuple[int, slice | Tensor]]:
    """The experts that have rows, and which."""
    if ends is not None:
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                yield expert, slice(begin, end)
            begin = end
        return
    assert ids is not None
    for expert in ids.unique().tolist():
        if not -experts <= expert < experts:
            raise IndexError(f"expert {expert} of {experts}, expected a number from {-experts} to {experts - 1}")
        yield expert % experts, (ids == expert).nonzero()[:, 0]
