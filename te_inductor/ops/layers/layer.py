"""Linear layers of one input in low precision, made of the other ops: what dense layers and experts have in common, and
what a layer is composed of."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from te_inductor.distributed.parallel import Parallel
from te_inductor.ops.casts import Copy, ScalePair
from te_inductor.ops.delayed import record_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.layers.parts import (
    BoundOperand,
    GradientSink,
    Operand,
    ScaledOperand,
    ScaleSource,
    StepTensors,
    WeightGradient,
    is_turned,
)
from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.recipes.backward_precision import Operands
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import FP16_OVERFLOW
from te_inductor.recipes.losses import Loss

Saved = Sequence[Any]  # tensors and Nones that a backward needs


@constant
class LayerSpec(Constant):
    """What a layer is, in the one constant of its op. `output` is how results go, and how their gradients come."""

    slots: Slots
    scales: ScaleSource = ScaleSource()
    input: Operand = Operand()
    weight: Operand = Operand()
    output: Operand = Operand()
    sink: GradientSink = GradientSink()
    parallel: Parallel | None = None  # of DTensors
    loss: Loss | None = None  # of an output layer whose logits nothing else reads


class Needed(NamedTuple):
    """The gradients that a backward computes. Of the layers of one call all want one or none does."""

    x: bool
    weights: bool
    biases: bool


@dataclass(frozen=True)
class Given:
    """What a call has besides x, its weights and biases, and what is known of those."""

    groups: Sequence[Any]  # what says how rows are grouped
    weight_dtype: torch.dtype
    sizes: Sequence[int]  # rows of each weight
    width: int  # columns of x and of the weights


@dataclass(frozen=True)
class Opened:
    """What a backward goes by."""

    given: Given
    dys: Sequence[Tensor]  # (M, N) each, as amaxes are recorded of them
    starts: Tensor | None  # (E + 1,), where groups begin in wgrad's operands, of experts


class GradientCopies(NamedTuple):
    """The copies of dy, where they are wanted."""

    rows: Sequence[Copy | None] = ()  # for dgrad, one a GEMM
    columns: Sequence[Copy] = ()  # for wgrad, one for all weights or one a weight
    shape: Sequence[Any] = ()  # dx's sizes in front of the last


_HERE, _NO_STEP = BoundOperand(), StepTensors()


@dataclass(frozen=True)
class LinearLayers(Operation):
    """Linear layers of one input, one GEMM for all where their weights have one scale; traced, so that its body becomes
    nodes of the forward and backward graphs. Layers whose weights are w₁, w₂, … are one layer whose weight is all of
    their rows.

    Inputs: x, the step's token or None, what says how rows are grouped (`groups` tensors), `count` weights, then their
    biases if they have any. A subclass has the form of the products: dense, or of experts."""

    spec: LayerSpec
    out_dtype: torch.dtype
    count: int = 1
    input: BoundOperand = _HERE
    weight: BoundOperand = _HERE
    output: BoundOperand = _HERE
    step: StepTensors = _NO_STEP
    takers: Sequence[Tensor] = ()  # of the sink
    sink: GradientSink | None = None  # in place of the spec's, which a graph can hold

    groups: ClassVar[int] = 0

    @property
    def slots(self) -> Slots:
        return self.spec.slots

    def compute(self, needs: Needs, x: Tensor, token: Tensor | None, *tensors: Any) -> tuple[tuple[Tensor, ...], Any]:
        given, weights, biases, needed = self._wanted(needs, tensors)
        dgrad, wgrad = self.of_backward
        a, of_x, shape = self.cast_input(x, given, needed._replace(weights=needed.weights and wgrad is self))
        bs, of_weights = self.cast_weights(weights, needed.x and dgrad is self)
        if needed.weights and wgrad is not self:
            of_x = wgrad.keep_input(x, a, given, needed)
        if needed.x and dgrad is not self:
            of_weights = dgrad.keep_weights(weights, bs)
        ys: list[Tensor] = []
        for b, bias in zip(bs, self._joined(biases, len(bs)), strict=True):
            late = self.output.adds_up and bias is not None  # a sum over ranks has it once
            y = self.multiply(a, b, None if late else bias, self.slots.fprop, given)
            y = self.output.back(_shaped(y, shape), added=False)
            ys.append(y + bias.to(self.out_dtype) if late else y)  # type: ignore[union-attr]
        if len(ys) < self.count:
            ys = list(ys[0].split(given.sizes, ys[0].dim() - 1))
        return tuple(ys), (of_x, of_weights, needed)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, _, *tensors = inputs
        given, weights, biases = self._parts(tensors)
        of_x, of_weights, ctx.needs = found
        ctx.save_for_backward(*of_x, *of_weights, *given.groups)
        ctx.ends = len(of_x), len(of_x) + len(of_weights)
        ctx.given = replace(given, groups=())  # which are tensors
        ctx.dtypes = x.dtype, biases[0].dtype if biases else None
        ctx.turned = all(map(is_turned, weights))

    def backward(self, ctx: Any, *dys: Tensor) -> Gradients:
        needed: Needed = ctx.needs
        saved = ctx.saved_tensors  # once: each access unpacks them
        of_x, of_weights = saved[: ctx.ends[0]], saved[ctx.ends[0] : ctx.ends[1]]
        given: Given = replace(ctx.given, groups=saved[ctx.ends[1] :])
        x_dtype, bias_dtype = ctx.dtypes
        dx, dbs = None, [None] * (0 if bias_dtype is None else len(dys))
        dws: list[Tensor | None] = [None] * len(dys)
        dgrad, wgrad = self.of_backward
        opened = wgrad.open(dys, of_x, given)
        columns = dgrad.weight_columns(of_weights, given)
        copies = self._cast_gradients(opened, len(columns), needed)
        if needed.x:
            pairs = zip(copies.rows, columns, strict=True)
            dxs = [dgrad.multiply(a, b(), None, self.slots.dgrad, given) for a, b in pairs]
            dx = self.input.back(_shaped(functools.reduce(torch.add, dxs), copies.shape), added=True)
            dx = self.gathered_gradient(dx, given).to(x_dtype)  # under autocast x is wider
        if needed.weights:
            b = wgrad.input_column(opened, of_x)
            multiply = functools.partial(wgrad.multiply_wgrad, opened)
            dws = []
            for place, a in enumerate(copies.columns):
                of = slice(place, place + 1) if len(copies.columns) > 1 else slice(None)
                gradient = WeightGradient(a, b, self.slots.wgrad, opened.starts, multiply, given.sizes[of], ctx.turned)
                dws.extend((self.sink or self.spec.sink).take(gradient, self.takers[of]))
        if needed.biases:
            dbs = self.bias_gradients(opened, bias_dtype)  # type: ignore[assignment]
        return dx, None, *[None] * self.groups, *dws, *dbs

    @property
    def of_backward(self) -> tuple["LinearLayers", "LinearLayers"]:
        """The layers whose dgrad and whose wgrad these have: they themselves, unless their slots say otherwise."""
        dgrad, wgrad = self.slots.dgrad_operands, self.slots.wgrad_operands
        of_dgrad = self._with(dgrad)
        return of_dgrad, of_dgrad if wgrad == dgrad else self._with(wgrad)

    def _with(self, operands: Operands | None) -> "LinearLayers":
        if operands is None:
            return self
        if operands.slots is None:
            from te_inductor.ops.layers import high_precision

            return high_precision.of(self, operands.dequantized)
        spec = replace(self.spec, slots=operands.slots, scales=ScaleSource(), weight=Operand())
        return replace(self, spec=spec, weight=_HERE, step=_NO_STEP)

    def _cast_gradients(self, opened: Opened, gemms: int, needed: Needed) -> GradientCopies:
        """The copies of dy, both made at once where they are of one kind."""
        dgrad, wgrad = self.of_backward
        if not (needed.x or needed.weights):
            return GradientCopies()
        alike = dgrad is wgrad
        made = GradientCopies()
        if alike or needed.x:
            made = dgrad.cast_gradients(opened, gemms, needed if alike else needed._replace(weights=False))
        if not alike and needed.weights:
            made = made._replace(columns=wgrad.cast_gradients(opened, gemms, needed._replace(x=False)).columns)
        if self.step.grad_amax is not None:
            record_amax(opened.dys, self.step.grad_amax)
        return made

    def pair(self, slot: str, pieces: Sequence[Tensor], operand: BoundOperand | None = None) -> ScalePair | None:
        """The scale that pieces are cast with, where it does not follow from them alone. What several ranks have a part
        of has one. In a first step all tensors do, so that it begins the histories of one rank."""
        among = operand if operand is not None and operand.shares_scale else None
        if among is None and self.spec.scales.is_shared:
            among = next((one for one in (self.input, self.output) if one.ranks is not None), None)
        shared = None if among is None else functools.partial(among.largest, pieces)
        return self.spec.scales.pair(ScaledOperand(slot, pieces, self.quantizer(slot), self.step, shared))

    def quantizer(self, slot: str) -> Quantizer:
        return getattr(self.slots, slot)  # type: ignore[no-any-return]

    def found(self, weights: Sequence[Tensor], columnwise: bool) -> list[tuple[Copy, Copy | None]] | None:
        """The weights' copies that need no cast."""
        if isinstance(weights[0], GatheredWeight):
            return [weight.copies(columnwise) for weight in weights]  # type: ignore[attr-defined]
        return self.weight.found(weights, columnwise)

    def _parts(self, inputs: Sequence[Any]) -> tuple[Given, Sequence[Tensor], Sequence[Tensor]]:
        groups, rest = inputs[: self.groups], inputs[self.groups :]
        weights = rest[: self.count]
        sizes = [weight.shape[-2] for weight in weights]
        return Given(groups, weights[0].dtype, sizes, weights[0].shape[-1]), weights, rest[self.count :]

    def _wanted(self, needs: Needs, inputs: Sequence[Any]) -> tuple[Given, Sequence[Tensor], Sequence[Tensor], Needed]:
        given, weights, biases = self._parts(inputs)
        wanted = needs[-len(weights) - len(biases) :]
        return given, weights, biases, Needed(needs[0], any(wanted[: self.count]), any(wanted[self.count :]))

    def _joined(self, biases: Sequence[Tensor], gemms: int) -> list[Tensor | None]:
        """The bias of each GEMM."""
        if not biases or len(biases) == gemms:
            return list(biases) or [None] * gemms
        return [torch.cat(list(biases), biases[0].dim() - 1)]

    # What the form of the products says.

    def cast_input(self, x: Tensor, given: Given, needed: Needed) -> tuple[Copy, Saved, Sequence[Any]]:
        """fprop's copy, what the backward needs of x, and the sizes of the result in front of the last."""
        raise NotImplementedError

    def cast_weights(self, weights: Sequence[Tensor], columnwise: bool) -> tuple[list[Copy], Saved]:
        """fprop's copies, one a GEMM, and what the backward needs of them."""
        raise NotImplementedError

    def keep_input(self, x: Tensor, copy: Copy, given: Given, needed: Needed) -> Saved:
        """What these layers' wgrad needs of x, whose copy other layers' fprop has."""
        return self.cast_input(x, given, needed)[1]

    def keep_weights(self, weights: Sequence[Tensor], rows: Sequence[Copy]) -> Saved:
        """What these layers' dgrad needs of the weights, whose copies other layers' fprop has."""
        return self.cast_weights(weights, True)[1]

    def multiply(self, a: Copy | None, b: Copy, bias: Tensor | None, gemm: Gemm, given: Given) -> Tensor:
        """fprop's and dgrad's product."""
        raise NotImplementedError

    def open(self, dys: Sequence[Tensor], of_x: Saved, given: Given) -> Opened:
        """What a backward begins with."""
        raise NotImplementedError

    def cast_gradients(self, opened: Any, gemms: int, needed: Needed) -> GradientCopies:
        """Casts dy for a backward of so many dgrads."""
        raise NotImplementedError

    def weight_columns(self, of_weights: Saved, given: Given) -> list[Callable[[], Copy]]:
        """What makes dgrad's copies, one a GEMM."""
        raise NotImplementedError

    def gathered_gradient(self, dx: Tensor, given: Given) -> Tensor:
        """The gradient of x, of that of the rows that were multiplied."""
        return dx

    def input_column(self, opened: Any, of_x: Saved) -> Copy:
        """wgrad's copy of x."""
        raise NotImplementedError

    def multiply_wgrad(self, opened: Any, a: Copy, b: Copy, gemm: Gemm, dtype: torch.dtype | None) -> Tensor:
        """wgrad's product in this dtype, or, None, as autograd gets it of a weight in its own."""
        raise NotImplementedError

    def bias_gradients(self, opened: Any, dtype: torch.dtype) -> Sequence[Tensor]:
        raise NotImplementedError


def flat(x: Tensor) -> Tensor:  # (M, C)
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def present(copy: Copy | None) -> list[Copy]:
    return [] if copy is None else [copy]


def _shaped(y: Tensor, shape: Sequence[Any]) -> Tensor:
    return y.reshape(*shape, y.shape[1]) if len(shape) > 1 else y


def made_dtype(out_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a weight's gradient is made in that autograd gets in `dtype`. Under fp16 autocast PyTorch makes it in fp16
    and widens it: what overflows there has to here."""
    return torch.float16 if out_dtype == torch.float16 else dtype


def overflowing_sum(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where fp16 is, if the layer computes in that: Note [Overflow stays visible] in
    lowerings/casts/values.py."""
    return torch.where(total.abs() < FP16_OVERFLOW, total, total * torch.inf) if dtype == torch.float16 else total
