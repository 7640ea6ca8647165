"""Products with experts' weights that are stored in low precision, for inference: (E, N, K), of which a row of x
meets one matrix. Either rows stand together by expert, and `ends` says where each expert's end, or `ids` has each
row's expert.

Where an expert has few rows, a GPU reads the stored values of the experts that have any, and multiplies them by x as it
is: templates/triton/experts_decode.py. With more rows FP8 weights are multiplied by x in FP8, and NVFP4 ones written
out first. A CPU multiplies what is stored by x as it is.
"""

from typing import Any

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.compat import constant_type_name
from te_inductor.ops.casts import quantize
from te_inductor.ops.definition import define
from te_inductor.ops.grouped import grouped_mm
from te_inductor.recipes import Quantizer, Slots
from te_inductor.recipes.formats import ALIGNMENT
from te_inductor.runtime.eager import experts, grouped

_QUANTIZER = constant_type_name(Quantizer)
# Rows up to which a GPU multiplies with the stored values: so many times the number of experts, or so many if that is
# more.
FEW_EACH, FEW = 16, 512
DTYPES = (torch.bfloat16, torch.float16)  # of x, that the kernels take


def is_few(rows: Any, count: int) -> bool:
    """Whether so many rows of x are few for so many experts."""
    return bool(rows <= max(FEW, FEW_EACH * count))


def _nvfp4_fake(
    x: Tensor,  # (M, K)
    ends: Tensor | None,  # (E,) int32
    ids: Tensor | None,  # (M,); one of the two
    stored: Tensor,  # (E, N, K/2)
    block_scale: Tensor,  # (E, N, K/16)
    tensor_scale: Tensor,  # (E,)
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N), zeros for rows of no expert
    return x.new_empty((x.shape[0], stored.shape[1]), dtype=out_dtype)


def _fp8_fake(
    x: Tensor,  # (M, K)
    ends: Tensor | None,
    ids: Tensor | None,
    values: Tensor,  # (E, N, K padded)
    scale_inv: Tensor,  # (E,), (E, N), or (E, what the scope stores of one expert)
    quantizer: Quantizer,
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N)
    return x.new_empty((x.shape[0], values.shape[1]), dtype=out_dtype)


def _plain_fake(
    x: Tensor,  # (M, K)
    ends: Tensor,  # (E,) int32
    whole: Tensor,  # (E, N, K)
) -> Tensor:  # (M, N)
    return x.new_empty((x.shape[0], whole.shape[1]))


def _dequantize_fake(stored: Tensor, *rest: Any) -> Tensor:  # (E, N, k)
    *_, k, dtype = rest
    return stored.new_empty((*stored.shape[:2], k), dtype=dtype)


nvfp4_experts = define(
    "nvfp4_experts(Tensor x, Tensor? ends, Tensor? ids, Tensor stored, Tensor block_scale, Tensor tensor_scale,"
    " ScalarType out_dtype) -> Tensor",
    experts.nvfp4_product,
    _nvfp4_fake,
)
fp8_experts = define(
    f"fp8_experts(Tensor x, Tensor? ends, Tensor? ids, Tensor values, Tensor scale_inv, {_QUANTIZER} q,"
    " ScalarType out_dtype) -> Tensor",
    experts.fp8_product,
    _fp8_fake,
)
# The product of matrices in high precision: torch compiles its own grouped product for bf16 alone.
plain_experts = define(
    "plain_experts(Tensor x, Tensor ends, Tensor whole) -> Tensor", experts.plain_product, _plain_fake
)
nvfp4_experts_dequantize = define(
    "nvfp4_experts_dequantize(Tensor stored, Tensor block_scale, Tensor tensor_scale, SymInt k, ScalarType dtype)"
    " -> Tensor",
    experts.nvfp4_dequantize,
    _dequantize_fake,
)
fp8_experts_dequantize = define(
    f"fp8_experts_dequantize(Tensor values, Tensor scale_inv, {_QUANTIZER} q, SymInt k, ScalarType dtype) -> Tensor",
    experts.fp8_dequantize,
    _dequantize_fake,
)


def nvfp4_product(x: Tensor, ends: Tensor | None, ids: Tensor | None, *weight: Tensor) -> Tensor:
    """`nvfp4_experts`, or what a GPU does in its place with many rows."""
    stored = weight[0]
    if x.device.type != "cuda" or _runs_few(x, stored, targets.of(x.device).nvfp4_kernels):
        return nvfp4_experts(x, ends, ids, *weight, x.dtype)  # type: ignore[no-any-return]
    whole = nvfp4_experts_dequantize(*weight, x.shape[1], x.dtype)
    return experts.product_of_whole(x, ends, ids, whole, x.dtype)


def fp8_product(x: Tensor, ends: Tensor | None, ids: Tensor | None, slots: Slots, *weight: Tensor) -> Tensor:
    """`fp8_experts`, or what a GPU does in its place with many rows: x is cast as well, as the recipe says."""
    values, scale_inv = weight
    few = x.device.type != "cuda" or _runs_few(x, values, targets.of(x.device).fp8)
    scope, aligned = slots.input.granularity, values.shape[1] % ALIGNMENT == 0
    multiplies = aligned and not (scope.blocked and not scope.one_row)
    if few or not multiplies or not grouped.has_kernel(x.device, slots.fprop):
        return fp8_experts(x, ends, ids, values, scale_inv, slots.weight, x.dtype)  # type: ignore[no-any-return]
    order = None
    if ends is None:
        assert ids is not None
        order, ends = experts.sorted_by_expert(ids, values.shape[0])
        x = x[order]
    else:
        x = grouped.mask_rows(x, ends)
    y = grouped_mm(*quantize(x, slots.input), values, scale_inv, ends, None, slots.fprop, x.dtype)
    return y if order is None else torch.empty_like(y).index_copy_(0, order, y)


def _runs_few(x: Tensor, stored: Tensor, kernel: bool) -> bool:
    for size in stored.shape:  # a weight's sizes are constants of the graph: asking for an int makes them so
        int(size)
    return kernel and x.dtype in DTYPES and is_few(x.shape[0], int(stored.shape[0]))
