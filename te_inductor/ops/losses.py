"""Cross entropy of an output layer's tokens, without its logits: Note [Loss of chunks] in runtime/eager/losses.py."""

import torch
from torch import Tensor

from te_inductor.recipes import Slots
from te_inductor.recipes.formats import padded
from te_inductor.recipes.losses import Loss
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import losses


def _token_losses_fake(
    x: Tensor,  # (N, K)
    weight: Tensor,  # (V, K), of x's dtype
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    wants_dx: bool,
    wants_dy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # losses (N,) fp32; the softmax's sums (N,) fp32, logarithms; dx (N, K), dy (N, V) of losses of gradient 1, or empty
    n, k = x.shape
    rows = n if wants_dy else 0
    return (
        x.new_empty((n,), dtype=torch.float32),
        x.new_empty((n,), dtype=torch.float32),
        x.new_empty((n if wants_dx else 0, k)),
        x.new_empty((rows, weight.shape[0])),
    )


def _scaled_token_losses_fake(
    x: Tensor,  # (N, K), low precision
    x_scale_inv: Tensor,
    weight: Tensor,  # (V, pad(K)), low precision
    weight_scale_inv: Tensor,
    columns: Tensor | None,  # (K, pad(V)), the weight's columnwise copy, where dx is wanted
    columns_scale_inv: Tensor | None,
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    slots: Slots,
    dtype: torch.dtype,  # of the logits
    wants_dy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # losses and sums; dx (N, K), dy columnwise (V, pad(N)), as above
    n, k = x.shape[0], 0 if columns is None else columns.shape[0]
    dy = slots.grad_output.format.dtype
    return (
        x.new_empty((n,), dtype=torch.float32),
        x.new_empty((n,), dtype=torch.float32),
        x.new_empty((n if columns is not None else 0, k), dtype=dtype),
        x.new_empty((weight.shape[0] if wants_dy else 0, padded(n)), dtype=dy),
    )


token_losses = op_of(losses.token_losses, _token_losses_fake)
scaled_token_losses = op_of(losses.scaled_token_losses, _scaled_token_losses_fake)
