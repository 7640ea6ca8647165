"""FLOPs of the products, for torch's `FlopCounterMode` and for its partitioner, which weighs by them what the backward
recomputes where users set an activation memory budget. Sizes are those that are multiplied, padding included."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config, partitioners
from torch.utils.flop_counter import register_flop_formula

from te_inductor import compat, ops
from te_inductor.ops import experts as ops_experts
from te_inductor.ops import stored as ops_stored
from te_inductor.runtime.eager.grouped import GROUP_ALIGNMENT

ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def counted(formula: Callable[[Any], int], *counted_ops: Any) -> None:
    """Has torch count ops by a formula, which reads their arguments by the names that their schemas have."""
    for op in counted_ops:
        names = [argument.name for argument in op._schema.arguments]

        def count(*args: Any, out_val: Any = None, names: Sequence[str] = tuple(names), **kwargs: Any) -> int:
            return formula(SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs))

        register_flop_formula(op.overloadpacket, get_raw=True)(count)


def of_gemm(given: Any) -> int:
    """a (M, K) times b (N, K), or of experts (E, N, K), of which each row meets one matrix. wgrad's K is without the columns
    that are there for groups of any sizes, most of which no GEMM visits."""
    starts = getattr(given, "starts", None)
    padding = 0 if starts is None else GROUP_ALIGNMENT * (starts.shape[0] - 1)
    return 2 * given.a.shape[0] * (given.a.shape[1] * given.gemm.packed - padding) * given.b.shape[-2]


def _of_library(given: Any) -> int:
    """torch's grouped products, whose right operand lies the other way round; wgrad's has no dimension of experts."""
    padding = 0 if given.b.dim() == 3 else GROUP_ALIGNMENT * given.ends.shape[0]
    return 2 * given.a.shape[0] * (given.a.shape[1] - padding) * given.b.shape[-1]


def _of_stored(given: Any) -> int:
    """x (M, K) times a weight (N, …) that is stored, or one matrix of it for each row, of experts (E, N, …)."""
    [weight] = (getattr(given, name) for name in ("stored", "values", "whole") if hasattr(given, name))
    return 2 * given.x.shape[0] * given.x.shape[1] * weight.shape[-2]


def _of_loss(given: Any) -> int:
    """The logits, and the gradient of x where it is wanted."""
    wants_dx = given.wants_dx if hasattr(given, "wants_dx") else given.columns is not None
    return 2 * given.x.shape[0] * given.x.shape[1] * given.weight.shape[0] * (1 + wants_dx)


counted(of_gemm, ops.scaled_mm, ops.grouped_mm, ops.grouped_wgrad)
counted(of_gemm, ops.accumulate_wgrad, ops.accumulate_grouped_wgrad, ops.defer_wgrad)
counted(_of_library, ops.scaled_grouped_mm)
counted(_of_stored, ops_stored.nvfp4_linear, ops_stored.nvfp4_linear_fp8)
counted(_of_stored, ops_experts.nvfp4_experts, ops_experts.fp8_experts, ops_experts.plain_experts)
counted(_of_loss, ops.token_losses, ops.scaled_token_losses)


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
