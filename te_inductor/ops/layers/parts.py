"""The parts of a layer, each a small protocol whose base class is the plain case: how its operands come about
(`Operand`), what their scales follow from (`ScaleSource`), where weight gradients go (`GradientSink`).

A part is a constant of the layer's `LayerSpec`. What it needs besides, as tensors, are arguments of the op, which the
part has from `bound`: another kind of part is a file here and what puts it into a spec, and no change of the op."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_inductor.distributed.parallel import Ranks, largest
from te_inductor.ops.casts import Copy, ScalePair, current_scale, tensor_amax
from te_inductor.ops.differentiable import Operation
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.constants import Constant, constant
from te_inductor.runtime.extra_inputs import Takers


class BoundOperand:
    """An operand in one call, with its tensors. Here: rows are on this rank, and are cast at each call."""

    ranks: Ranks | None = None  # with which rows are exchanged, of the operand or of what the layer makes
    shares_scale = False  # whether one copy holds rows of several ranks
    adds_up = False  # whether what the layer makes is a sum over ranks

    def found(self, weights: Sequence[Tensor], columnwise: bool) -> list[tuple[Copy, Copy | None]] | None:
        """The row copy and the column copy of a weight for each GEMM, where they are there already; None: they have to
        be cast. A column copy that is None has to be cast too, where it is wanted."""
        return None

    def forth(self, x: Tensor) -> Tensor:
        """Rows as the products read them, of this rank's."""
        return x

    def back(self, y: Tensor, added: bool) -> Tensor:
        """What the layer makes of those rows, where they came from; a gradient is `added` up."""
        return y

    def largest(self, pieces: Sequence[Tensor]) -> Tensor:
        """The largest amax of the pieces on all `ranks`, as a matrix of one element, which a scale follows from."""
        assert self.ranks is not None
        amaxes = [tensor_amax(piece) for piece in pieces]
        amax = torch.stack(amaxes).amax() if len(amaxes) > 1 else amaxes[0]
        return largest(amax, self.ranks).view(1, 1)


@constant
class Operand(Constant):
    """The way an operand's copies come about. Here: as `BoundOperand` says."""

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        """The operand with its tensors and sizes in a call."""
        return BoundOperand()


@dataclass(frozen=True)
class StepTensors:
    """What a step of delayed scaling brings to one call. None of it is for autograd's check that nothing saved has
    changed: it is of this step alone, or mutable."""

    pairs: Sequence[Tensor] = ()  # scale and scale_inv, both (), of each operand that has one
    grad_amax: Tensor | None = None  # in which the backward records the gradients' amax


@dataclass(frozen=True)
class ScaledOperand:
    """What a scale is wanted of."""

    slot: str
    pieces: Sequence[Tensor]  # which share the scale
    quantizer: Quantizer
    step: StepTensors = StepTensors()
    shared: Callable[[], Tensor] | None = (
        None  # of what is cast with the same scale on several ranks: their largest amax
    )

    def current(self) -> ScalePair:
        """The scale that follows from its own amax."""
        return ScalePair(*current_scale(self.pieces if self.shared is None else [self.shared()], self.quantizer))


@constant
class ScaleSource(Constant):
    """What the scale of an operand follows from, if it has one. Here: the operand itself, where it is cast."""

    def pair(self, operand: ScaledOperand) -> ScalePair | None:
        """The scale and its reciprocal, where the cast does not find them itself."""
        return None if operand.shared is None else operand.current()

    @property
    def is_shared(self) -> bool:
        """Whether all operands of a layer that exchanges tensors with other ranks have the scales of one rank."""
        return False

    @property
    def first(self) -> "ScaleSource":
        """The source in a step in which some quantizer of the graph has no history: Note [A first step]."""
        return self


@dataclass(frozen=True)
class WeightGradient:
    """The product that is the gradient of a layer's weights, before anything is done with it."""

    a: Copy  # dy columnwise
    b: Copy  # x columnwise
    gemm: Gemm
    starts: Tensor | None  # (E + 1,), where each group of columns begins, of experts
    multiply: Callable[[Copy, Copy, Gemm, torch.dtype | None], Tensor]
    sizes: Sequence[int]  # rows of each weight
    turned: bool  # whether the weights lie in memory as their transposes
    dtype: torch.dtype | None = None  # of the gradients, in which the GEMM writes them; None: that of the weights

    def laid_out(self) -> Sequence[Tensor]:
        """The gradients of weights that are one layer, each laid out as its weight, as what is laid out otherwise
        autograd copies. A weight that is `turned` has a GEMM of its own, whose operands are in the other order."""
        if not (self.turned and self.gemm.transposes):
            dw = self.multiply(self.a, self.b, self.gemm, self.dtype)
            return dw.split(list(self.sizes), -2) if len(self.sizes) > 1 else [dw]
        pieces = self.a.split(self.sizes) if len(self.sizes) > 1 else [self.a]
        return [self.multiply(self.b, piece, self.gemm.transposed, self.dtype).mT for piece in pieces]


@constant
class GradientSink(Constant):
    """The place where a layer's weight gradients go. Here: autograd."""

    takers: ClassVar[Takers | None] = None  # the inputs of a graph that take them in autograd's place

    def around(self, layers: Operation, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        """The layers as autograd sees them; `tensors` are the sink's."""
        return layers

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What autograd gets of each weight; `tensors` are what takes them in its place, one a weight."""
        return gradient.laid_out()


def is_turned(weight: Tensor) -> bool:
    """Whether a weight (N, K), or (E, N, K), lies in memory as (K, N), as the view of a parameter that is written so."""
    *experts, n, k = weight.shape
    return min(n, k) > 1 and weight.stride() == (*(n * k for _ in experts), 1, n)


def is_empty(x: Tensor) -> bool:
    """Whether a tensor (…, C) is known to have no rows."""
    return any(isinstance(size, int) and size == 0 for size in x.shape[:-1])
