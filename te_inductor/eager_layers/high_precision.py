"""Operations in high precision: shapes, factors, bias, dropout, activations and their gated forms, norms, and sums and
pieces over a process group. They call the kernels that plain PyTorch's autograd calls."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from te_inductor.ops.differentiable import Gradients, Needs, Operation

aten = torch.ops.aten


class LinearMap(Operation):
    """An operation of one input whose gradient is a function of the output's alone."""

    def value(self, x: Tensor) -> Tensor:
        """The output; aliases no input."""
        raise NotImplementedError

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of x, of this shape."""
        raise NotImplementedError

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return self.value(x), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.shape = inputs[0].shape

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (self.gradient(grads[0], ctx.shape),)


class OfInputs(Operation):
    """An operation whose backward needs its inputs, and by itself computes the forward once more."""

    def value(self, *inputs: Any) -> Tensor:
        """The output; aliases no input."""
        raise NotImplementedError

    def gradients(self, needs: Needs, dy: Tensor, *inputs: Any) -> Gradients:
        """The gradients of the inputs. Here: by autograd."""
        given, places = list(inputs), [place for place, need in enumerate(needs) if need]

        def of_wanted(*wanted: Tensor) -> Tensor:
            for place, x in zip(places, wanted, strict=True):
                given[place] = x
            return self.value(*given)

        pull = torch.func.vjp(of_wanted, *(given[place] for place in places))[1]
        found = iter(pull(dy))
        return tuple(next(found) if need else None for need in needs)

    def compute(self, needs: Needs, *inputs: Any) -> tuple[Tensor, None]:
        return self.value(*inputs), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return self.gradients(ctx.needs_input_grad[1:], grads[0], *ctx.saved_tensors)  # after the operation's own


# ---- shapes, factors, bias, dropout


@dataclass(frozen=True)
class Identity(LinearMap):
    def value(self, x: Tensor) -> Tensor:
        return x.clone()

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return dy


@dataclass(frozen=True)
class Reshape(LinearMap):
    shape: tuple[int, ...]

    def value(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape).clone()

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return dy.reshape(shape)


@dataclass(frozen=True)
class ConstantScale(LinearMap):
    scale: float

    def value(self, x: Tensor) -> Tensor:
        return x * self.scale

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return dy * self.scale


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


# ---- activations


@dataclass(frozen=True)
class ReLU(OfInputs):
    def value(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def gradients(self, needs: Needs, dy: Tensor, x: Tensor) -> Gradients:
        return (aten.threshold_backward(dy, x, 0),)


@dataclass(frozen=True)
class SquaredReLU(OfInputs):
    """``relu(x) ** 2``"""

    def value(self, x: Tensor) -> Tensor:
        return F.relu(x).square()

    def gradients(self, needs: Needs, dy: Tensor, x: Tensor) -> Gradients:
        return (aten.threshold_backward(dy * (2 * F.relu(x)), x, 0),)


@dataclass(frozen=True)
class SiLU(OfInputs):
    def value(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def gradients(self, needs: Needs, dy: Tensor, x: Tensor) -> Gradients:
        return (aten.silu_backward(dy, x),)


@dataclass(frozen=True)
class GELU(OfInputs):
    approximate: str = "none"  # or "tanh"

    def value(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def gradients(self, needs: Needs, dy: Tensor, x: Tensor) -> Gradients:
        return (aten.gelu_backward(dy, x, approximate=self.approximate),)


class Gated(OfInputs):
    """``activation(gate) * up``; saves both inputs."""

    activation: OfInputs

    def value(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation.value(gate) * up

    def gradients(self, needs: Needs, dy: Tensor, gate: Tensor, up: Tensor) -> Gradients:
        return *self.activation.gradients(needs, dy * up, gate), dy * self.activation.value(gate)


@dataclass(frozen=True)
class SwiGLU(Gated):
    """``silu(gate) * up``; saves both inputs."""

    activation = SiLU()


@dataclass(frozen=True)
class GeGLU(Gated):
    """``gelu(gate) * up``; saves both inputs."""

    approximate: str = "none"  # or "tanh"

    @property
    def activation(self) -> GELU:  # type: ignore[override]
        return GELU(self.approximate)


# ---- norms over the last dimension


@dataclass(frozen=True)
class LayerNorm(Operation):
    """LayerNorm over the last dimension. Inputs: x (..., N), and gain and bias, each (N,) or None."""

    eps: float = 1e-5

    def compute(
        self, needs: Needs, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, mean, rstd = aten.native_layer_norm(x, x.shape[-1:], gain, bias, self.eps)
        return y, (mean, rstd)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: tuple[Tensor, Tensor]) -> None:
        given = (*inputs, None, None)[:3]
        ctx.count = len(inputs)
        ctx.save_for_backward(*given, *found)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        x, gain, bias, mean, rstd = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[1:], False, False][:3]
        found = aten.native_layer_norm_backward(grads[0], x, x.shape[-1:], mean, rstd, gain, bias, mask)
        return tuple(found[: ctx.count])


@dataclass(frozen=True)
class RMSNorm(OfInputs):
    """RMSNorm over the last dimension. Inputs: x (..., N), and gain (N,) or None. The backward computes the forward
    once more."""

    eps: float | None = None  # None: that of x's dtype

    def value(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gain, self.eps)


@dataclass(frozen=True)
class L2Normalization(OfInputs):
    """``x / sqrt(sum(x**2) + eps)`` over the last dimension, in fp32. The backward computes the forward once more."""

    eps: float = 1e-6

    def value(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


# ---- over a process group; results are waited for


@dataclass(frozen=True)
class AllReduce(LinearMap):
    """The sum of x over a process group; the gradient, which all ranks have, goes to each."""

    group: Any  # a ProcessGroup, or its name

    def value(self, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", self.group))

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return dy


@dataclass(frozen=True)
class AllGather(LinearMap):
    """The x (R, …) of all ranks, one below the other; of the gradients, the sum of this rank's rows."""

    group: Any

    def value(self, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), 0, self.group))

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return ReduceScatter(self.group).value(dy)


@dataclass(frozen=True)
class ReduceScatter(LinearMap):
    """This rank's rows of the sum of all ranks' x (ranks * R, …); its gradient is gathered."""

    group: Any

    def value(self, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", 0, self.group))

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return AllGather(self.group).value(dy)
