"""Layers whose products are dense. A forward casts both copies of an operand at once; the backward reads those of x and
w that wgrad and dgrad multiply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.casts import Copy, ScalePair, copies, current_scale, transpose
from te_inductor.ops.gemm import product
from te_inductor.ops.layers.layer import (
    Given,
    GradientCopies,
    LinearLayers,
    Needed,
    Opened,
    Saved,
    flat,
    made_dtype,
    overflowing_sum,
    present,
)
from te_inductor.ops.layers.parts import BoundOperand
from te_inductor.recipes import Gemm


@dataclass(frozen=True)
class DenseLayers(LinearLayers):
    """Inputs: x (M, K), or (…, K) where its rows are other ranks' too; weights (N, K), biases (N,). Saved for backward:
    the columnwise copies of x and w, one byte an element each; of a compiled graph recompute.py says which of them the
    backward casts anew instead."""

    def cast_input(self, x: Tensor, given: Given, needed: Needed) -> tuple[Copy, Saved, Sequence[Any]]:
        row, column, shape = self._copies([x], "input", self.input, True, needed.weights)
        return row, Copy.saved(column), shape  # type: ignore[return-value]

    def cast_weights(self, weights: Sequence[Tensor], columnwise: bool) -> tuple[list[Copy], Saved]:
        pairs: Any = self.found(weights, columnwise)
        if pairs is None:
            known = self.pair("weight", weights)
            pairs = [copies(weights, 0, self.slots.weight, known, columnwise=columnwise)]
        elif columnwise and pairs[0][1] is None:
            known = self.pair("weight", weights)
            pairs = [(pairs[0][0], copies(weights, 0, self.slots.weight, known, rowwise=False, columnwise=True)[1])]
        saved = [part for _, column in pairs for part in Copy.saved(column if columnwise else None)]
        return [row for row, _ in pairs], saved

    def multiply(self, a: Copy | None, b: Copy, bias: Tensor | None, gemm: Gemm, given: Given) -> Tensor:
        return product(a, b, bias, gemm, self.out_dtype)

    def open(self, dys: Sequence[Tensor], of_x: Saved, given: Given) -> Opened:
        return _Dense(given, list(map(flat, dys)), None, dys)

    def cast_gradients(self, opened: "_Dense", gemms: int, needed: Needed) -> GradientCopies:
        """Casts dy with one scale, however many GEMMs there are. A layer whose sums are scattered is one GEMM."""
        quantizer = self.slots.grad_output
        if gemms == 1:
            row, column, shape = self._copies(opened.whole, "grad_output", self.output, needed.x, needed.weights)
            return GradientCopies([row], present(column), shape)
        known = self.pair("grad_output", opened.dys, self.output)
        if known is None and quantizer.granularity.whole:
            known = ScalePair(*current_scale(opened.dys, quantizer))
        rows: list[Copy | None] = [None] * gemms
        if needed.x:
            rows = [copies([dy], 1, quantizer, known, columnwise=False)[0] for dy in opened.dys]
        column = copies(opened.dys, 1, quantizer, known, rowwise=False, columnwise=True)[1] if needed.weights else None
        return GradientCopies(rows, present(column), opened.whole[0].shape[:-1])

    def weight_columns(self, of_weights: Saved, given: Given) -> list[Callable[[], Copy]]:
        return [partial(Copy, *of_weights[place : place + 3]) for place in range(0, len(of_weights), 3)]

    def input_column(self, opened: Opened, of_x: Saved) -> Copy:
        return Copy(*of_x)

    def multiply_wgrad(self, opened: Opened, a: Copy, b: Copy, gemm: Gemm, dtype: torch.dtype | None) -> Tensor:
        of_weight = opened.given.weight_dtype
        made = dtype or made_dtype(self.out_dtype, of_weight)
        return product(a, b, None, gemm, made).to(dtype or of_weight)

    def bias_gradients(self, opened: Opened, dtype: torch.dtype) -> Sequence[Tensor]:
        sums = (dy.sum(0, dtype=torch.float32) for dy in opened.dys)
        return [overflowing_sum(total, self.out_dtype).to(dtype) for total in sums]

    def _copies(
        self, pieces: Sequence[Tensor], slot: str, operand: BoundOperand, rowwise: bool, columnwise: bool
    ) -> tuple[Copy | None, Copy | None, Sequence[Any]]:
        """The copies of pieces (…, C) side by side in their last dimension, and the sizes in front of it. Of what
        several ranks have rows of the bytes are gathered where they have one scale, else the values."""
        quantizer = self.quantizer(slot)
        if operand.shares_scale and not quantizer.granularity.whole:
            pieces, operand = [operand.forth(piece) for piece in pieces], BoundOperand()
        rows = [flat(piece) for piece in pieces]
        known = self.pair(slot, rows, operand)
        if not operand.shares_scale:
            made = copies(rows, 1, quantizer, known, rowwise=rowwise, columnwise=columnwise)
            return *made, pieces[0].shape[:-1]
        row, _ = copies(rows, 1, quantizer, known, columnwise=False)
        assert row is not None  # it was asked for
        data = operand.forth(row.data.view(*pieces[0].shape[:-1], row.data.shape[1]))
        row = Copy(flat(data), row.scale_inv)
        columns = sum(piece.shape[1] for piece in rows)
        column = Copy(transpose(row.data, columns), row.scale_inv) if columnwise else None
        return row, column, data.shape[:-1]


@dataclass(frozen=True)
class _Dense(Opened):
    whole: Sequence[Tensor]  # dys, (…, N) each
