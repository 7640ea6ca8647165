"""Selective checkpointing: a policy that names `aten.mm` or `aten.addmm` means a layer's product, in low precision too.

A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` says op by op what is saved and what is
computed again. Where a layer was rewritten it meets `te_inductor.scaled_mm`, of which it has never heard; so it is
asked about the op that stood there, with operands like those that stood there. A policy that names
`te_inductor.scaled_mm` is taken at its word."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from te_inductor import ops
from te_inductor.recipes import Gemm

_META = "_checkpoint_context_fn"  # where Dynamo leaves what the user gave torch.utils.checkpoint
_UNNAMED = ops.dequantize  # an op that no policy has a reason to name


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
        if op is not ops.scaled_mm or said != policy(context, _UNNAMED, *args, **kwargs):
            return said
        bias, product = args[4], _as_it_stood(*args)
        if bias is None:
            return policy(context, torch.ops.aten.mm.default, *product)
        return policy(context, torch.ops.aten.addmm.default, bias, *product)

    return ask


def _as_it_stood(
    a: Tensor, _: Tensor, b: Tensor, __: Tensor, bias: Tensor | None, gemm: Gemm, out_dtype: torch.dtype, *___: Any
) -> tuple[Tensor, Tensor]:  # (M, pad(K)), (pad(K), N)
    """Operands of the sizes and the dtype that a product in high precision has; nobody looks at their values."""
    columns = a.shape[1] * gemm.packed
    return a.new_empty((a.shape[0], columns), dtype=out_dtype), b.new_empty((columns, b.shape[0]), dtype=out_dtype)
