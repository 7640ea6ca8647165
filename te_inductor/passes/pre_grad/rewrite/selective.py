"""Selective checkpointing: a policy that names `aten.mm`, `aten.addmm` or `aten._grouped_mm` means a layer's product, in
low precision too.

A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` says op by op what is saved and what is
computed again. Where a layer was rewritten it meets `te_inductor.scaled_mm` or `te_inductor.grouped_mm`, of which it
has never heard; so it is asked about the op that stood there, with operands like those that stood there. A policy that
names ours is taken at its word."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from te_inductor import ops
from te_inductor.recipes import Gemm

_META = "_checkpoint_context_fn"  # where Dynamo leaves what the user gave torch.utils.checkpoint
_UNNAMED = ops.dequantize  # an op that no policy has a reason to name
aten = torch.ops.aten


def translate(body: fx.GraphModule) -> None:
    """Have the policy of a checkpoint's body, if it has one, understand low-precision products."""
    context_fn = body.meta.get(_META)
    if context_fn is not None and not isinstance(context_fn, _Translated):
        body.meta[_META] = _Translated(context_fn)


@dataclass
class _Translated:
    context_fn: Callable[[], tuple[Any, Any]]

    def __call__(self) -> tuple[Any, Any]:
        forward, recompute = self.context_fn()
        if hasattr(forward, "policy_fn"):
            forward.policy_fn = _asked(forward.policy_fn)
        return forward, recompute

    def __getattr__(self, name: str) -> Any:
        """`cache_hash`, which AOTAutograd's cache asks for, and what else the user's function has."""
        return getattr(self.__dict__["context_fn"], name)


def _asked(policy: Callable[..., Any]) -> Callable[..., Any]:
    def ask(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        said = policy(context, op, *args, **kwargs)
        if op not in _PRODUCTS or said != policy(context, _UNNAMED, *args, **kwargs):
            return said
        return policy(context, *_PRODUCTS[op](*args))

    return ask


def _mm(
    a: Tensor, _: Tensor, b: Tensor, __: Tensor, bias: Tensor | None, gemm: Gemm, out_dtype: torch.dtype, *___: Any
) -> tuple[Any, ...]:
    """The op as it stood, and operands of the sizes and the dtype that it had; nobody looks at their values."""
    columns = a.shape[1] * gemm.packed
    # (M, pad(K)), (pad(K), N)
    product = a.new_empty((a.shape[0], columns), dtype=out_dtype), b.new_empty((columns, b.shape[0]), dtype=out_dtype)
    return (aten.mm.default, *product) if bias is None else (aten.addmm.default, bias, *product)


def _grouped_mm(
    a: Tensor, _: Tensor, b: Tensor, __: Tensor, ends: Tensor, bias: Any, gemm: Gemm, out_dtype: torch.dtype, *___: Any
) -> tuple[Any, ...]:
    experts, rows, columns = b.shape[0], b.shape[1], a.shape[1] * gemm.packed
    # (M, pad(K)), (E, pad(K), N)
    x, weight = (a.new_empty(shape, dtype=out_dtype) for shape in ((a.shape[0], columns), (experts, columns, rows)))
    return aten._grouped_mm.default, x, weight, ends


_PRODUCTS: dict[Any, Callable[..., tuple[Any, ...]]] = {ops.scaled_mm: _mm, ops.grouped_mm: _grouped_mm}
