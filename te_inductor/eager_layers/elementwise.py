"""Operations on single values: shapes, factors, bias, dropout, activations and their gated forms."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation

aten = torch.ops.aten


@dataclass(frozen=True)
class Identity(Operation):
    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return x.clone(), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        pass

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return grads


@dataclass(frozen=True)
class Reshape(Operation):
    shape: tuple[int, ...]

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return x.reshape(self.shape).clone(), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.shape = inputs[0].shape

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (grads[0].reshape(ctx.shape),)


@dataclass(frozen=True)
class ConstantScale(Operation):
    scale: float

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return x * self.scale, None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        pass

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (grads[0] * self.scale,)


@dataclass(frozen=True)
class Bias(Operation):
    """x (..., N) plus bias (N,), whose gradient is summed in fp32."""

    def compute(self, needs: Needs, x: Tensor, bias: Tensor) -> tuple[Tensor, None]:
        return x + bias, None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.dtype = inputs[1].dtype

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0], dy.sum(0, dtype=torch.float32).to(ctx.dtype) if ctx.needs_input_grad[-1] else None


@dataclass(frozen=True)
class Dropout(Operation):
    """Each value is 0 with probability p, else divided by 1 - p; torch's seed decides."""

    p: float

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = aten.native_dropout(x, self.p, True)
        return y, mask

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Tensor) -> None:
        ctx.save_for_backward(found)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [mask] = ctx.saved_tensors
        return (aten.native_dropout_backward(grads[0], mask, 0.0 if self.p == 1 else 1 / (1 - self.p)),)


@dataclass(frozen=True)
class ReLU(Operation):
    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return F.relu(x), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (aten.threshold_backward(grads[0], *ctx.saved_tensors, 0),)


@dataclass(frozen=True)
class SquaredReLU(Operation):
    """``relu(x) ** 2``"""

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return F.relu(x).square(), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [x] = ctx.saved_tensors
        return (aten.threshold_backward(grads[0] * (2 * F.relu(x)), x, 0),)


@dataclass(frozen=True)
class SiLU(Operation):
    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return F.silu(x), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (aten.silu_backward(grads[0], *ctx.saved_tensors),)


@dataclass(frozen=True)
class GELU(Operation):
    approximate: str = "none"  # or "tanh"

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return F.gelu(x, approximate=self.approximate), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (aten.gelu_backward(grads[0], *ctx.saved_tensors, approximate=self.approximate),)


@dataclass(frozen=True)
class SwiGLU(Operation):
    """``silu(gate) * up``; saves both inputs."""

    def compute(self, needs: Needs, gate: Tensor, up: Tensor) -> tuple[Tensor, None]:
        return F.silu(gate) * up, None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        return aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate)


@dataclass(frozen=True)
class GeGLU(Operation):
    """``gelu(gate) * up``; saves both inputs."""

    approximate: str = "none"  # or "tanh"

    def compute(self, needs: Needs, gate: Tensor, up: Tensor) -> tuple[Tensor, None]:
        return F.gelu(gate, approximate=self.approximate) * up, None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        gradient = aten.gelu_backward(grads[0] * up, gate, approximate=self.approximate)
        return gradient, grads[0] * F.gelu(gate, approximate=self.approximate)
