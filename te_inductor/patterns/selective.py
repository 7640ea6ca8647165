"""Selective checkpointing: a policy that names `aten.mm` or `aten.addmm` means a layer's product, in low precision too.

A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` says op by op what is saved and what is computed
again. Where a layer was rewritten it meets `te_inductor.scaled_mm`, of which it has never heard; so it is asked about the
op that stood there, with its operands as they stood there. A policy that names `te_inductor.scaled_mm` is taken at its word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from te_inductor import ops

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
        a, _, b, _, bias, *_ = args
        if bias is None:
            return policy(context, torch.ops.aten.mm.default, a, b.t())
        return policy(context, torch.ops.aten.addmm.default, bias, a, b.t())

    return ask
