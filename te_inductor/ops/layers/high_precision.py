"""Layers whose backward multiplies in high precision, as autograd does: dy times the weight and x themselves, or times what
fprop's copies of them stand for, rounded to the dtype in which the layer computes. A layer in low precision has its
dgrad, its wgrad or both from these: `LinearLayers.of_backward`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.casts import Copy, copies, values
from te_inductor.ops.experts import fp8_experts_dequantize
from te_inductor.ops.layers.dense import DenseLayers
from te_inductor.ops.layers.experts import ExpertLayers
from te_inductor.ops.layers.layer import Given, GradientCopies, LinearLayers, Needed, Opened, Saved, flat
from te_inductor.recipes import Gemm
from te_inductor.runtime.eager import grouped


def _as_it_is(x: Tensor) -> Copy:
    return Copy(x, x.new_ones((), dtype=torch.float32))


@dataclass(frozen=True)
class HighDense(DenseLayers):
    """Saved for backward: x in the dtype in which the layer computes, and the weights; or fprop's copies."""

    dequantized: bool = field(kw_only=True)

    def keep_input(self, x: Tensor, copy: Copy, given: Given, needed: Needed) -> Saved:
        return Copy.saved(copy) if self.dequantized else (flat(self.input.forth(x)).to(self.out_dtype),)

    def keep_weights(self, weights: Sequence[Tensor], rows: Sequence[Copy]) -> Saved:
        return [part for row in rows for part in Copy.saved(row)] if self.dequantized else weights

    def cast_gradients(self, opened: Any, gemms: int, needed: Needed) -> GradientCopies:
        whole = [self.output.forth(dy) for dy in opened.whole]
        dys = list(map(flat, whole))
        rows = dys if gemms == len(dys) else [torch.cat(dys, 1)]
        return GradientCopies(list(map(_as_it_is, rows)), [_as_it_is(dy.t()) for dy in dys], whole[0].shape[:-1])

    def weight_columns(self, of_weights: Saved, given: Given) -> list[Callable[[], Copy]]:
        if not self.dequantized:
            return [partial(self._column, weight) for weight in of_weights]
        rows = (Copy(*of_weights[place : place + 3]) for place in range(0, len(of_weights), 3))
        return [partial(self._values, row, "weight", given) for row in rows]

    def input_column(self, opened: Opened, of_x: Saved) -> Copy:
        return self._values(Copy(*of_x), "input", opened.given) if self.dequantized else self._column(of_x[0])

    def _column(self, x: Tensor) -> Copy:
        return _as_it_is(x.to(self.out_dtype).t())

    def _values(self, row: Copy, slot: str, given: Given) -> Copy:
        return _as_it_is(values(row, self.quantizer(slot), given.width, self.out_dtype).t())


@dataclass(frozen=True)
class HighExperts(ExpertLayers):
    """Saved for backward: x and the weights; or copies of their rows. The products are torch's own, of bf16, with rows by
    group as they stand."""

    dequantized: bool = field(kw_only=True)

    def keep_input(self, x: Tensor, copy: Copy, given: Given, needed: Needed) -> Saved:
        if not self.dequantized:
            return (x.to(self.out_dtype),)
        row: Any = copy
        if given.groups[1] is not None:  # what fprop has is picked of it
            row, _ = copies([x], 0, self.slots.input, self.pair("input", [x], self.input), columnwise=False)
        return Copy.saved(row)

    def keep_weights(self, weights: Sequence[Tensor], rows: Sequence[Copy]) -> Saved:
        return Copy.saved(rows[0]) if self.dequantized else weights

    def cast_gradients(self, opened: Opened, gemms: int, needed: Needed) -> GradientCopies:
        [dy] = opened.dys
        return GradientCopies([_as_it_is(dy)], [_as_it_is(dy.t())])

    def weight_columns(self, of_weights: Saved, given: Given) -> list[Callable[[], Copy]]:
        def column() -> Copy:  # (E, N, K)
            if self.dequantized:
                return _as_it_is(self._experts_values(Copy(*of_weights), given.width))
            whole = of_weights[0] if len(of_weights) == 1 else torch.cat(list(of_weights), 1)
            return _as_it_is(whole.to(self.out_dtype))

        return [column]

    def multiply(self, a: Copy | None, b: Copy, bias: Tensor | None, gemm: Gemm, given: Given) -> Tensor:
        assert a is not None  # it was asked for
        ends = given.groups[0]
        return grouped.mask_rows(torch._grouped_mm(a.data, b.data, offs=ends), ends)

    def input_column(self, opened: Any, of_x: Saved) -> Copy:
        given, x = opened.given, of_x[0]
        if self.dequantized:
            x = values(Copy(*of_x), self.slots.input, given.width, self.out_dtype)
        rows = given.groups[1]
        return _as_it_is((x if rows is None else x[rows]).t())

    def multiply_wgrad(self, opened: Any, a: Copy, b: Copy, gemm: Gemm, dtype: torch.dtype | None) -> Tensor:
        return torch._grouped_mm(a.data, b.data.t(), offs=opened.ends).to(dtype or opened.given.weight_dtype)

    def _experts_values(self, rows: Copy, width: int) -> Tensor:  # (E, N, K)
        quantizer = self.slots.weight
        if not quantizer.granularity.blocked:
            scale = rows.scale_inv.reshape(rows.data.shape[0], -1, 1)
            return (rows.data[:, :, :width].float() * scale).to(self.out_dtype)
        dtype = self.out_dtype if rows.amax is None else torch.float32
        found: Tensor = fp8_experts_dequantize(rows.data, rows.scale_inv, quantizer, width, dtype)
        return found if rows.amax is None else (found * (rows.amax / quantizer.two_level_max)).to(self.out_dtype)


def of(layers: LinearLayers, dequantized: bool) -> LinearLayers:
    """The layers whose backward multiplies in high precision what some layers have: the operands themselves, or what
    copies of them stand for."""
    kind = HighExperts if isinstance(layers, ExpertLayers) else HighDense
    return kind(**vars(layers), dequantized=dequantized)
