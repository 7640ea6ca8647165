"""Experts' ops on CUDA: the Triton kernels where the device runs them, else plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels.grouped_mm import runs
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, ROW
from te_inductor.runtime.definition import implement_on_cuda
from te_inductor.runtime.eager import grouped
from te_inductor.templates.triton import experts_rows, group_strips
from te_inductor.templates.triton import grouped_casts as casts
from te_inductor.templates.triton.grouped_mm import grouped_mm, grouped_wgrad

_kernels: dict[tuple[torch.device, tuple[str, str]], bool] = {}


def _has_kernel(device: torch.device, gemm: Gemm) -> bool:
    """`runs`, of which a launch asks without making anything of the scales' names."""
    key = device, gemm.scopes  # all that it depends on
    if key not in _kernels:
        _kernels[key] = runs(targets.of(device), gemm)
    return _kernels[key]


def _grouped_mm(
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
    if not _has_kernel(a.device, gemm):
        return grouped.grouped_mm(a, a_scale, b, b_scale, ends, bias, gemm, out_dtype, alpha)
    return grouped_mm(a, a_scale, b, b_scale, ends, bias, gemm, out_dtype)


def _grouped_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    starts: Tensor,
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,
) -> Tensor:
    if not _has_kernel(a.device, gemm):
        return grouped.grouped_wgrad(a, a_scale, b, b_scale, starts, gemm, out_dtype, alpha)
    return grouped_wgrad(a, a_scale, b, b_scale, starts, gemm, out_dtype)


def _accumulate_grouped_wgrad(
    totals: list[Tensor],
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    starts: Tensor,
    alpha: Tensor | None,
    gemm: Gemm,
) -> None:
    if len(totals) > 1 or not _has_kernel(a.device, gemm):
        grouped.accumulate_grouped_wgrad(totals, a, a_scale, b, b_scale, starts, alpha, gemm)
        return
    grouped_wgrad(a, a_scale, b, b_scale, starts, gemm, torch.float32, totals[0].data)


def _quantize_experts(
    w: Tensor, quantizer: Quantizer, amax: Tensor | None = None, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    if quantizer.granularity is BLOCK_128X128:
        return casts.quantize_experts_squares(w, quantizer, transposed)
    if quantizer.granularity is ROW and transposed:
        return casts.transpose_experts_by_row(w, quantizer)
    return grouped.quantize_experts(w, quantizer, amax, transposed)


def _quantize_experts_delayed(w: Tensor, scale: Tensor, quantizer: Quantizer, transposed: bool = False) -> Tensor:
    if transposed:
        return casts.transpose_experts(w, scale, quantizer)
    return grouped.quantize_experts_delayed(w, scale, quantizer)


def _quantize_experts_rows(w: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if experts_rows.supports(w):
        return experts_rows.quantize_experts_rows(w, quantizer)
    return *grouped.quantize_experts(w, quantizer), *casts.column_scales(w, None, None, w.shape[0], quantizer)


def _quantize_groups(
    x: Tensor, source: Tensor, tiles: Tensor, starts: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    if quantizer.granularity is ROW and group_strips.supports(x, source, starts.shape[0] - 1):
        return group_strips.quantize_groups_by_column(x, source, starts, quantizer)
    if quantizer.granularity is ROW or quantizer.granularity is BLOCK_1X128:
        return casts.quantize_groups(x, source, tiles, starts, quantizer)
    return grouped.quantize_groups(x, source, tiles, starts, quantizer)


KERNELS: dict[str, Callable[..., Any]] = {
    "grouped_mm": _grouped_mm,
    "grouped_wgrad": _grouped_wgrad,
    "accumulate_grouped_wgrad": _accumulate_grouped_wgrad,
    "quantize_experts": _quantize_experts,
    "quantize_experts_delayed": _quantize_experts_delayed,
    "quantize_experts_rows": _quantize_experts_rows,
    "quantize_groups": _quantize_groups,
    "transpose_groups": casts.transpose_groups,
}
implement_on_cuda(**KERNELS)
