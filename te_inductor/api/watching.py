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

    def measure(self, place: int, pieces: Sequence[LayerPiece]) -> Gradients:
        """What runs behind a layer; what it returns runs behind the gradient of the layer's output."""
        raise NotImplementedError

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


def shared_scale(pieces: Sequence[LayerPiece], tensors: Sequence[Tensor], quantizer: Quantizer) -> ScalePair | None:
    """The scale that the rows of all experts have together, given as a tensor of each piece; None where each piece has
    scales of its own."""
    shared = quantizer.granularity.whole and any(isinstance(piece.rows, slice) for piece in pieces)
    return ScalePair(*ops.current_scale([torch.cat(list(tensors))], quantizer)) if shared else None


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
