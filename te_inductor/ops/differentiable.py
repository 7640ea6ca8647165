"""The form of a differentiable operation: what it computes, what its backward needs of that, and the backward.

Autograd sees the three as one function. Where no gradient is wanted, `compute` alone runs.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import GradInterpreter, retrieve_all_functorch_interpreters

from te_inductor.errors import DoubleBackwardError

Needs = tuple[bool, ...]  # of each input, whether its gradient will be asked for
Gradients = tuple[Tensor | None, ...]  # of each input
PARTS = ("compute", "setup_context", "backward")


class Operation:
    """An operation with a backward. Instances hold what is constant in it (sizes, recipes, factors) and no state;
    tensors are inputs.

    A class defines `compute`, `setup_context` and `backward`, all three or, where it inherits them, none: a backward
    belongs to the computation that it was written for. Anything else is a TypeError when the class is defined."""

    def compute(self, needs: Needs, *inputs: Any) -> tuple[Any, Any]:
        """The outputs, a tensor or a tuple of them, none of which aliases an input; and what `setup_context` is to have
        of how they came about."""
        raise NotImplementedError

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        """Keep in `ctx`, by `save_for_backward` if it is a tensor, what `backward` needs; `found` is what `compute`
        left."""
        raise NotImplementedError

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        """The gradients of all inputs, of those of the outputs; None of what has none."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = [part for part in PARTS if part not in cls.__dict__]
        if missing and len(missing) < len(PARTS):
            defined = [part for part in PARTS if part not in missing]
            raise TypeError(
                f"{cls.__name__} defines {' and '.join(defined)} without {' and '.join(missing)}, expected all of"
                f" {', '.join(PARTS)}, or none where they are inherited"
            )

    def __call__(self, *inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return _transformed(self, inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return _Differentiable.apply(self, *inputs)
        return self.compute((False,) * len(inputs), *inputs)[0]


class _Differentiable(torch.autograd.Function):
    """Any operation, for autograd."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *inputs: Any) -> Any:
        outputs, found = operation.compute(ctx.needs_input_grad[1:], *inputs)
        operation.setup_context(ctx, inputs, found)
        ctx.operation = operation
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        # Even where no incoming gradient requires one: what is saved hangs on the inputs, and autograd does not know
        # how.
        if torch.is_grad_enabled():
            raise DoubleBackwardError(_TWICE)
        return None, *ctx.operation.backward(ctx, *grads)


class _Transformed(torch.autograd.Function):
    """Any operation under torch.func.grad, where a `setup_context` sees inputs and outputs alone: what the operation's
    makes and keeps for backward is an output too. Which gradients are wanted is not known at each level of transforms,
    so all are computed; of a graph that is traced, what nobody reads is dropped."""

    @staticmethod
    def forward(operation: Operation, *inputs: Any) -> Any:  # type: ignore[override]
        outputs, found = operation.compute(tuple(isinstance(x, Tensor) for x in inputs), *inputs)
        kept = SimpleNamespace(saved_tensors=(), operation=operation, single=isinstance(outputs, Tensor))
        kept.save_for_backward = lambda *tensors: setattr(kept, "saved_tensors", tensors)
        operation.setup_context(kept, inputs, found)
        saved, kept.saved_tensors = kept.saved_tensors, ()
        # An output that is an input may not be saved: of those the place is known.
        kept.places = [next((i for i, x in enumerate(inputs) if x is tensor), None) for tensor in saved]
        made = [tensor for tensor, place in zip(saved, kept.places, strict=True) if place is None]
        return *((outputs,) if kept.single else outputs), *made, len(made), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *outputs, count, ctx.kept = output
        ctx.count = len(outputs) - count
        made = outputs[ctx.count :]
        ctx.mark_non_differentiable(*(tensor for tensor in made if tensor is not None))
        rest = iter(made)
        ctx.save_for_backward(*(next(rest) if place is None else inputs[1 + place] for place in ctx.kept.places))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        known = {"saved_tensors": ctx.saved_tensors, "needs_input_grad": ctx.needs_input_grad}
        kept = SimpleNamespace(**{**vars(ctx.kept), **known})
        return None, *kept.operation.backward(kept, *grads[: ctx.count])


def _transformed(operation: Operation, inputs: tuple[Any, ...]) -> Any:
    if _differentiated_twice(inputs):
        raise DoubleBackwardError(_TWICE)
    *outputs, count, kept = _Transformed.apply(operation, *inputs)  # type: ignore[no-untyped-call]
    outputs = outputs[: len(outputs) - count]
    return outputs[0] if kept.single else tuple(outputs)


def _differentiated_twice(inputs: tuple[Any, ...]) -> bool:
    """Whether a gradient of torch.func's would be an input of another's, or of autograd's."""
    gradients = [one for one in retrieve_all_functorch_interpreters() if isinstance(one, GradInterpreter)]
    if len(gradients) != 1:
        return len(gradients) > 1
    return gradients[0].prev_grad_mode() and any(_plain(x).requires_grad for x in inputs if isinstance(x, Tensor))


def _plain(x: Tensor) -> Tensor:
    """The tensor that autograd itself sees."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


_TWICE = (
    "a gradient of a low-precision gradient was asked for, expected first-order gradients only; leave this module"
    " uncompiled, as torch differentiates no compiled graph twice, or compile what calls torch.func.grad twice with"
    ' options={"recipe": "none"}'
)
