"""FLOPs of the products, for torch's `FlopCounterMode` and for its partitioner, which weighs by them what the backward
recomputes where users set an activation memory budget. Sizes are those that are multiplied, padding included."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config, partitioners
from torch.utils.flop_counter import register_flop_formula

from te_inductor import compat, ops
from te_inductor.ops import experts as ops_experts
from te_inductor.ops import stored as ops_stored
from te_inductor.recipes import Gemm
from te_inductor.runtime.eager.grouped import GROUP_ALIGNMENT

ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


@register_flop_formula(ops.scaled_mm.overloadpacket, get_raw=True)
def scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, gemm: Gemm, *_: Any, **__: Any
) -> int:
    return _product(a, b, gemm)


@register_flop_formula(ops.accumulate_wgrad.overloadpacket, get_raw=True)
def wgrad(
    places: Any, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Any, gemm: Gemm, *_: Any, **__: Any
) -> int:
    return _product(a, b, gemm)


@register_flop_formula(ops.grouped_mm.overloadpacket, get_raw=True)
def grouped_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, bias: Any, gemm: Gemm, *_: Any, **__: Any
) -> int:
    """Each row is in one group, whatever their sizes are."""
    return 2 * a.shape[0] * a.shape[1] * gemm.packed * b.shape[1]


@register_flop_formula(ops.scaled_grouped_mm.overloadpacket, get_raw=True)
def scaled_grouped_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, **__: Any) -> int:
    """Counts the library's products, wgrad's without the columns that are there for groups of any sizes."""
    if b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * b.shape[2]
    return 2 * a.shape[0] * (a.shape[1] - GROUP_ALIGNMENT * ends.shape[0]) * b.shape[1]


@register_flop_formula(ops.grouped_wgrad.overloadpacket, get_raw=True)
def grouped_wgrad(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, starts: Tensor, gemm: Gemm, *_: Any, **__: Any
) -> int:
    """Counts without the columns that are there for groups of any sizes, most of which no GEMM visits."""
    columns = a.shape[1] * gemm.packed - GROUP_ALIGNMENT * (starts.shape[0] - 1)
    return 2 * a.shape[0] * columns * b.shape[0]


@register_flop_formula([ops.accumulate_grouped_wgrad.overloadpacket, ops.defer_wgrad.overloadpacket], get_raw=True)
def wgrad_elsewhere(places: Any, a: Any, a_scale: Any, b: Any, b_scale: Any, starts: Any, *rest: Any, **_: Any) -> int:
    gemm: Gemm = rest[1]
    return _product(a, b, gemm) if starts is None else grouped_wgrad(a, a_scale, b, b_scale, starts, gemm)


@register_flop_formula(ops_stored.nvfp4_linear_fp8.overloadpacket, get_raw=True)
def nvfp4_linear_fp8(x: Tensor, x_scale: Tensor, stored: Tensor, *_: Any, **__: Any) -> int:
    return nvfp4_linear(x, stored)


@register_flop_formula(ops_stored.nvfp4_linear.overloadpacket, get_raw=True)
def nvfp4_linear(x: Tensor, stored: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * stored.shape[0]


@register_flop_formula([ops_experts.nvfp4_experts.overloadpacket, ops_experts.fp8_experts.overloadpacket], get_raw=True)
def stored_experts(x: Tensor, ends: Any, ids: Any, stored: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * stored.shape[1]


@register_flop_formula(ops_experts.plain_experts.overloadpacket, get_raw=True)
def plain_experts(x: Tensor, ends: Tensor, whole: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * whole.shape[1]


@register_flop_formula(ops.token_losses.overloadpacket, get_raw=True)
def token_losses(x: Tensor, weight: Tensor, bias: Any, labels: Any, loss: Any, wants_dx: bool, *_: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * (1 + wants_dx)


@register_flop_formula(ops.scaled_token_losses.overloadpacket, get_raw=True)
def scaled_token_losses(x: Tensor, x_scale: Any, weight: Tensor, weight_scale: Any, columns: Any, *_: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * (1 + (columns is not None))


@contextmanager
def weighed() -> Iterator[None]:
    """Have torch's partitioner weigh our ops and attention, under a budget. By itself it takes all ops but its own for
    free, and of its own those that a list lacks, cuDNN's attention among them, which is what runs on Hopper."""
    attention = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): _attention for name in ATTENTION}
    ops_of_torch = partitioners.get_default_op_list

    def with_attention() -> partitioners.OpTypes:
        types = ops_of_torch()
        types.compute_intensive_ops.update(attention)
        return types

    with (
        config.patch(is_non_builtin_to_include=True),
        compat.patch("torch._functorch.partitioners.get_default_op_list", with_attention),
        compat.patch("torch.utils.flop_counter.flop_registry", lambda _: attention),
    ):
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Both products. torch's own refuses grouped queries."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _product(a: Tensor, b: Tensor, gemm: Gemm) -> int:
    return 2 * a.shape[0] * a.shape[1] * gemm.packed * b.shape[0]
