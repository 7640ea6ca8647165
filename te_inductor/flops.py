"""FLOPs of the products, for torch's `FlopCounterMode` and for its partitioner, which weighs by them what the backward
recomputes where users set an activation memory budget. Sizes are those that are multiplied, padding included."""

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from te_inductor import ops, ops_stored
from te_inductor.recipes import Gemm


@register_flop_formula([ops.scaled_mm.overloadpacket, ops.quantized_mm.overloadpacket], get_raw=True)
def scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, gemm: Gemm, *_: Any, **__: Any
) -> int:
    return _product(a, b, gemm)


@register_flop_formula([ops.accumulate_wgrad.overloadpacket, ops.defer_wgrad.overloadpacket], get_raw=True)
def wgrad(
    places: Any, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Any, gemm: Gemm, *_: Any, **__: Any
) -> int:
    return _product(a, b, gemm)


@register_flop_formula(ops_stored.nvfp4_linear_fp8.overloadpacket, get_raw=True)
def nvfp4_linear_fp8(x: Tensor, x_scale: Tensor, stored: Tensor, *_: Any, **__: Any) -> int:
    return nvfp4_linear(x, stored)


@register_flop_formula(ops_stored.nvfp4_linear.overloadpacket, get_raw=True)
def nvfp4_linear(x: Tensor, stored: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * stored.shape[0]


def _product(a: Tensor, b: Tensor, gemm: Gemm) -> int:
    packed = 2 if gemm.granularities[0].two_level else 1  # E2M1 values, two a byte
    return 2 * a.shape[0] * a.shape[1] * packed * b.shape[0]
