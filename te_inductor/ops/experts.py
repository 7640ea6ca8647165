"""Products with experts' weights that are stored in low precision, for inference: (E, N, K), of which a row of x
meets one matrix. Either rows stand together by expert, and `ends` says where each expert's end, or `ids` has each
row's expert.

Where an expert has few rows, a GPU reads the stored values of the experts that have any, and multiplies them by x as it
is: templates/triton/experts_decode.py. With more rows FP8 weights are multiplied by x in FP8, and NVFP4 ones written
out first. A CPU multiplies what is stored by x as it is.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels import cublaslt, grouped_mm
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.nvfp4_linear import PREFILL
from te_inductor.kernels.problem import Problem, Sizes, Stored
from te_inductor.kernels.select import select
from te_inductor.ops import grouped as ops_grouped
from te_inductor.ops.casts import quantize
from te_inductor.recipes import Gemm, Slots
from te_inductor.recipes.formats import E2M1
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import experts, grouped
from te_inductor.targets import Target


def _rows_of(x: Tensor, ends: Any, ids: Any, stored: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], stored.shape[1]), dtype=rest[-1])


def _whole_of(stored: Tensor, *rest: Any) -> Tensor:
    *_, k, dtype = rest
    return stored.new_empty((*stored.shape[:2], k), dtype=dtype)


nvfp4_experts = op_of(experts.nvfp4_product, _rows_of, name="nvfp4_experts")
fp8_experts = op_of(experts.fp8_product, _rows_of, name="fp8_experts")
# The product of matrices in high precision: torch compiles its own grouped product for bf16 alone.
plain_experts = op_of(
    experts.plain_product, lambda x, ends, whole: x.new_empty((x.shape[0], whole.shape[1])), name="plain_experts"
)
nvfp4_experts_dequantize = op_of(experts.nvfp4_dequantize, _whole_of, name="nvfp4_experts_dequantize")
fp8_experts_dequantize = op_of(experts.fp8_dequantize, _whole_of, name="fp8_experts_dequantize")


def nvfp4_product(x: Tensor, ends: Tensor | None, ids: Tensor | None, *weight: Tensor) -> Tensor:
    """`nvfp4_experts`, or what a GPU does in its place with many rows."""
    if _family(x, weight[0]) is not cublaslt.WRITTEN_OUT:
        return nvfp4_experts(x, ends, ids, *weight, x.dtype)  # type: ignore[no-any-return]
    whole = nvfp4_experts_dequantize(*weight, x.shape[1], x.dtype)
    return experts.product_of_whole(x, ends, ids, whole, x.dtype)


def fp8_product(x: Tensor, ends: Tensor | None, ids: Tensor | None, slots: Slots, *weight: Tensor) -> Tensor:
    """`fp8_experts`, or what a GPU does in its place with many rows: x is cast as well, as the recipe says."""
    values, scale_inv = weight
    if _family(x, values, slots) is not grouped_mm.FAMILY:
        return fp8_experts(x, ends, ids, values, scale_inv, slots.weight, x.dtype)  # type: ignore[no-any-return]

    def product(rows: Tensor, ends: Tensor) -> Tensor:
        a = quantize(rows, slots.input)
        return ops_grouped.grouped_mm(*a, values, scale_inv, ends, None, slots.fprop, x.dtype)  # type: ignore[no-any-return]

    if ends is None:
        return experts.sorted_product(x, ids, values.shape[0], product)
    return product(grouped.mask_rows(x, ends), ends)


def _family(x: Tensor, stored: Tensor, slots: Slots | None = None) -> KernelFamily:
    """The kernels that multiply; without slots by NVFP4. A weight's sizes are constants of the graph: asking for an int
    makes them so."""
    count, n, _ = (int(size) for size in stored.shape)
    kind = None if slots is None else (slots.input.scope, slots.weight.scope, slots.input.element, slots.weight.element)
    (m, k), chosen = x.shape, _chosen if isinstance(x.shape[0], int) else _chosen.__wrapped__
    return chosen(targets.of(x.device), m, n, k, count, x.dtype, kind)


@functools.lru_cache(4096)  # of layers in eager code, which ask at each call
def _chosen(
    target: Target, m: Any, n: int, k: int, count: int, dtype: torch.dtype, kind: tuple[str, str, str, str] | None
) -> KernelFamily:
    gemm = PREFILL if kind is None else Gemm("fprop", scopes=kind[:2], elements=kind[2:])
    stored = Stored(E2M1.name if kind is None else gemm.elements[1], dtype)
    return select(Problem(target, Sizes(m, n, k, count), gemm, dtype, stored=stored)).family
