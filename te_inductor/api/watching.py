"""Layers of a traced graph that show their tensors to a report, in high precision, as the model runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops.casts import ScalePair
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.recipes import Quantizer


@dataclass(frozen=True)
class LayerPiece:
    """One product of a layer: the layer's own, or that of one matrix of a batch, or of one expert."""

    x: Tensor  # (M, K)
    weight: Tensor  # (N, K)
    rows: Any = ...  # of the layer's output, which index it


Gradients = Callable[[Sequence[Tensor]], None]  # is given dy (M, N) of each piece
# What each GEMM multiplies: ``a @ b.T`` of these, or of their transposes, whose copies are the columnwise ones.
TENSORS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
COLUMNWISE = (("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))


class LayerWatch:
    """Sits in traced graphs, behind layers."""

    def watch(self, candidate: Candidate, place: int) -> bool:
        """Has `measure` called with the tensors of a layer, and with `place`, whenever it runs. Returns False for a
        layer whose rows go between ranks: what it multiplies is not in its graph."""
        match, groups = candidate.match, candidate.match.groups
        if match.arrives is not None or match.leaves is not None:
            return False
        ends = None if groups is None or groups.ends is match.x else groups.ends
        given: Any = (match.node, match.x, match.weight, place, match.transposed, ends, groups.rows if groups else None)
        with match.node.graph.inserting_after(match.node):
            seen = match.node.graph.call_function(self._see, given)
        match.node.replace_all_uses_with(seen, delete_user_cb=lambda user: user is not seen)
        return True

    def see(
        self, place: int, gemm: str, pieces: Sequence[LayerPiece], a: Sequence[Tensor], b: Sequence[Tensor]
    ) -> None:
        """What is done with the operands of a GEMM, those of each piece: ``a @ b.T`` is its product."""
        raise NotImplementedError

    @torch.no_grad()
    def measure(self, place: int, pieces: Sequence[LayerPiece]) -> Gradients:
        """What runs behind a layer; what it returns runs behind the gradient of the layer's output."""
        xs, weights = [piece.x for piece in pieces], [piece.weight for piece in pieces]
        self.see(place, "fprop", pieces, xs, weights)

        @torch.no_grad()
        def measure_gradients(dys: Sequence[Tensor]) -> None:
            self.see(place, "dgrad", pieces, dys, [weight.t() for weight in weights])
            self.see(place, "wgrad", pieces, [dy.t() for dy in dys], [x.t() for x in xs])

        return measure_gradients

    def change(self, place: int, pieces: Sequence[LayerPiece], y: Tensor) -> Tensor:
        """What the model goes on with in the place of the layer's output."""
        return y.view_as(y)  # a tensor of its own to hang the hook on

    def _see(
        self,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        place: int,
        transposed: bool,
        ends: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        pieces = _pieces(x.detach(), weight.detach(), transposed, ends, rows)
        measure = self.measure(place, pieces)
        y = self.change(place, pieces, y)
        if y.requires_grad:
            y.register_hook(lambda dy: measure([_matrix(dy[piece.rows].detach()) for piece in pieces]))
        return y


def cast(
    gemm: str,
    tensor: str,
    pieces: Sequence[LayerPiece],
    values: Sequence[Tensor],
    quantizer: Quantizer,
    known: ScalePair | None,
) -> list[ops.Copy]:
    """The copies of one operand of a GEMM, of each piece. A scale of the whole tensor is the one that is known, else that
    which the rows of all experts have together, else each piece's own."""
    shared = tensor != "weight" and any(isinstance(piece.rows, slice) for piece in pieces)
    if not quantizer.granularity.whole:
        known = None
    elif known is None and shared:
        known = ScalePair(*ops.current_scale(list(values), quantizer))
    if (gemm, tensor) in COLUMNWISE:
        made = [ops.copies([one.t()], 0, quantizer, known, rowwise=False, columnwise=True)[1] for one in values]
    else:
        made = [ops.copies([one], 0, quantizer, known, columnwise=False)[0] for one in values]
    return made  # type: ignore[return-value]


def _pieces(x: Tensor, weight: Tensor, transposed: bool, ends: Tensor | None, rows: Tensor | None) -> list[LayerPiece]:
    matrices = weight.transpose(-2, -1) if transposed else weight
    if weight.dim() == 2:
        return [LayerPiece(_matrix(x), matrices)]
    if ends is None:
        return [LayerPiece(_matrix(one), matrices[place], place) for place, one in enumerate(x)]
    x, last = x if rows is None else x[rows], [0, *ends.tolist()]
    spans = [slice(begin, end) for begin, end in pairwise(last)]
    return [LayerPiece(x[span], one, span) for span, one in zip(spans, matrices, strict=True) if span.stop > span.start]


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
