"""Layers that train with a weight which `quantize_` is going to store: quantization-aware training.

Each forward stores the weight, which stays a parameter in high precision, and multiplies by what is stored, by the kernels
that multiply stored weights. The gradient passes the cast straight through: ``dx = dy @ dequantize(w)``, as through a
stored weight, and ``dw = dyᵀ x``. So what `quantize_` stores afterwards are the bits that the last forward multiplied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.numerics import nvfp4
from te_inductor.ops.casts import tensor_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.stored import NVFP4Product
from te_inductor.ops.written_out import is_called
from te_inductor.runtime.definition import op_of


def _stored_like(weight: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    n, blocks = weight.shape[0], -(-weight.shape[1] // nvfp4.BLOCK)
    return (
        weight.new_empty((n, blocks * nvfp4.BLOCK // 2), dtype=torch.uint8),
        weight.new_empty((n, blocks), dtype=torch.float8_e4m3fn),
        weight.new_empty((), dtype=torch.float32),
    )


nvfp4_store = op_of(nvfp4.stored, _stored_like, name="nvfp4_store")
is_called(nvfp4_store)


@dataclass(frozen=True)
class TrainedNVFP4(Operation):
    """Inputs: x (M, K), a weight (N, K), the amax that its scale follows from, or None. Saved for backward: x, and what is
    stored of the weight."""

    prefill: str
    out_dtype: torch.dtype

    def compute(self, needs: Needs, x: Tensor, weight: Tensor, amax: Tensor | None) -> tuple[Tensor, Any]:
        stored, block_scale, tensor_scale = nvfp4_store(weight, amax)
        y = NVFP4Product.product(x, stored, block_scale, tensor_scale, self.prefill, self.out_dtype)
        return y, (stored, block_scale, tensor_scale, needs)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, weight, _ = inputs
        *stored, needs = found
        ctx.save_for_backward(x if needs[1] else None, *(stored if needs[0] else ()))
        ctx.needs, ctx.width, ctx.dtypes = needs, x.shape[1], (x.dtype, weight.dtype)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [dy], (x, *stored), (x_dtype, dtype) = grads, ctx.saved_tensors, ctx.dtypes
        dx = NVFP4Product.gradient(dy, *stored, ctx.width).to(x_dtype) if ctx.needs[0] else None
        return dx, torch.mm(dy.t(), x.to(dy.dtype)).to(dtype) if ctx.needs[1] else None, None


def trace_nvfp4_trained(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K), a parameter in high precision
    bias: Tensor | None,  # (N,)
    prefill: str,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,  # () fp32, of `nvfp4_shared_amax`
) -> Tensor:  # (..., N)
    """What `nvfp4_weight_only` computes of the weight as it is stored, with a gradient for the weight too."""
    y = TrainedNVFP4(prefill, out_dtype)(x.reshape(-1, x.shape[-1]), weight, amax)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def trace_nvfp4_shared_amax(weights: Sequence[Tensor]) -> Tensor:  # () fp32
    """The largest amax of weights that have one scale, as `quantize_` gives those that engines multiply as one matrix."""
    return torch.stack([tensor_amax(weight.detach()) for weight in weights]).amax()


nvfp4_shared_amax = op_of(trace_nvfp4_shared_amax, name="nvfp4_shared_amax")
nvfp4_trained = op_of(trace_nvfp4_trained, name="nvfp4_trained")
