"""Cross entropy of an output layer's tokens, without its logits: Note [Loss of chunks] in runtime/eager/losses.py."""

from typing import Any

import torch
from torch import Tensor

from te_inductor.recipes.formats import padded
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import losses

_Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _results(x: Tensor, dx: Any, dy: Any, dtype: torch.dtype, dy_dtype: torch.dtype) -> _Results:
    """Losses and the logarithms of the softmax's sums, and gradients of these shapes."""
    of_tokens = (x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2))
    return *of_tokens, x.new_empty(dx, dtype=dtype), x.new_empty(dy, dtype=dy_dtype)  # type: ignore[return-value]


def _fake(x: Tensor, weight: Tensor, _: Any, __: Any, ___: Any, wants_dx: bool, wants_dy: bool) -> _Results:
    n, k = x.shape
    return _results(x, (n if wants_dx else 0, k), (n if wants_dy else 0, weight.shape[0]), x.dtype, x.dtype)


def _scaled_fake(x: Tensor, _: Any, weight: Tensor, __: Any, columns: Tensor | None, *more: Any) -> _Results:
    *_, slots, dtype, wants_dy = more
    n, dy_dtype = x.shape[0], slots.grad_output.format.dtype
    dx = (0, 0) if columns is None else (n, columns.shape[0])
    return _results(x, dx, (weight.shape[0] if wants_dy else 0, padded(n)), dtype, dy_dtype)


token_losses = op_of(losses.token_losses, _fake)
scaled_token_losses = op_of(losses.scaled_token_losses, _scaled_fake)
