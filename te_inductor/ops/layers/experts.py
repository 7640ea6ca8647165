"""Layers whose weights are experts', each of which multiplies its group of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels import grouped_mm
from te_inductor.kernels.problem import Problem, Program, Sizes
from te_inductor.kernels.select import select
from te_inductor.ops import grouped as ops
from te_inductor.ops.casts import Copy, copies, current_scale, quantize_delayed, tensor_amax
from te_inductor.ops.gemm import operands_of
from te_inductor.ops.layers.layer import (
    Given,
    GradientCopies,
    LinearLayers,
    Needed,
    Opened,
    Saved,
    made_dtype,
    overflowing_sum,
    present,
)
from te_inductor.ops.layers.parts import BoundOperand
from te_inductor.ops.permutations import cat_bytes, place_rows, take_bytes
from te_inductor.ops.written_out import leaves
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import ROW
from te_inductor.runtime.eager import grouped
from te_inductor.templates import grouped_library as library


@dataclass(frozen=True)
class ExpertLayers(LinearLayers):
    """Inputs: x (T, K); groups are ends (E,), rows (M,) or None: which rows of x the experts see, places (T, M / T) or
    None: where each row of x is among those; weights (E, N, K), biases (E, N). Saved for backward: with one scale a
    tensor, x's row copy, whose bytes wgrad transposes; else x itself, as scales of wgrad's operands belong to a group's
    columns. The backward casts weights again, which stay in memory anyway, unless their copies are kept."""

    groups: ClassVar[int] = 3

    def cast_input(self, x: Tensor, given: Given, needed: Needed) -> tuple[Copy, Saved, Sequence[Any]]:
        (ends, rows, places), quantizer = given.groups, self.slots.input
        row, _ = copies([x], 0, quantizer, self.pair("input", [x], self.input), columnwise=False)
        assert row is not None
        row = _sent(row, self.input, ends)
        # Without a gradient of x nobody else wants the places, which are a sort's inverse.
        a = row if rows is None else _picked(row, quantizer, rows, places if needed.x else None, x.shape)
        return a, (row.data, row.scale_inv) if quantizer.granularity.whole else (x, None), ()

    def cast_weights(self, weights: Sequence[Tensor], columnwise: bool) -> tuple[list[Copy], Saved]:
        """Saved are the scales with which the backward casts, the column copy, and the weights where there is none."""
        quantizer, found = self.slots.weight, self.found(weights, columnwise)
        scales: tuple[Any, ...] = None, None, None
        if found is not None:
            [(row, column)] = found
            if column is not None:
                return [row], (*scales, column.data, column.scale_inv)
            return [row], (*(self._weight_scales(weights) if columnwise else scales), None, None, *weights)
        if columnwise and quantizer.granularity is ROW and len(weights) == 1 and weights[0].is_contiguous():
            data, scale_inv, *of_columns = ops.quantize_experts_rows(weights[0], quantizer)
            return [Copy(data, scale_inv)], (*of_columns, None, None, None, *weights)
        scales = self._weight_scales(weights)
        return [self._weight_copy(weights, scales, transposed=False)], (*scales, None, None, *weights)

    def multiply(self, a: Copy | None, b: Copy, bias: Tensor | None, gemm: Gemm, given: Given) -> Tensor:
        ends = given.groups[0]
        *operands, alpha = operands_of(a, b, gemm)
        if self._native(gemm, ends, given):
            return library.grouped_mm(*operands, ends, bias, gemm, alpha)  # type: ignore[call-arg, arg-type]
        return ops.grouped_mm(*operands, ends, bias, gemm, self.out_dtype, alpha)  # type: ignore[no-any-return]

    def open(self, dys: Sequence[Tensor], of_x: Saved, given: Given) -> Opened:
        dy, ends, seen = torch.cat(list(dys), 1) if len(dys) > 1 else dys[0], given.groups[0], of_x[0].shape[0]
        if self.output.ranks is None:  # else it is, where it has come
            dy = grouped.mask_rows(dy, ends)
            seen = dy.shape[0]
        native = self._native(self.slots.wgrad, dy, given)
        return _Grouped(given, [dy], *grouped.layout(ends, seen, grouped.GROUP_ALIGNMENT if native else 0), ends)

    def cast_gradients(self, opened: "_Grouped", gemms: int, needed: Needed) -> GradientCopies:
        [dy], quantizer = opened.dys, self.slots.grad_output
        row: Copy | None = None
        if quantizer.granularity.whole:
            known = self.pair("grad_output", [dy], self.output)
            scale, scale_inv = (known.scale, known.scale_inv) if known else current_scale([dy], quantizer)
            row = _sent(Copy(quantize_delayed(dy, scale, quantizer), scale_inv), self.output, opened.ends)
            data, scale_inv = _stored_columns(row.data, dy.shape[1]), row.scale_inv
        else:
            if needed.x:
                row, _ = copies([dy], 0, quantizer, None, columnwise=False)
            data, scale_inv = dy, None
        column = opened.columns(data, scale_inv, opened.source, quantizer) if needed.weights else None
        return GradientCopies([row], present(column))

    def weight_columns(self, of_weights: Saved, given: Given) -> list[Callable[[], Copy]]:
        scales, column, weights = of_weights[:3], of_weights[3:5], of_weights[5:]
        if not weights:
            return [partial(Copy, *column)]
        return [partial(self._weight_copy, weights, scales, transposed=True)]

    def gathered_gradient(self, dx: Tensor, given: Given) -> Tensor:
        """Adds rows up in fp32, row by row of x, where autograd adds them in the order of atomics."""
        places = given.groups[2]
        return dx if places is None else dx[places].sum(1, dtype=torch.float32)

    def input_column(self, opened: "_Grouped", of_x: Saved) -> Copy:
        (x, scale_inv), rows, source = of_x, opened.given.groups[1], opened.source
        if rows is not None:
            source = torch.where(source >= 0, rows[source.clamp(min=0)], -1).int()
        x = x if scale_inv is None else _stored_columns(x, opened.given.width)
        return opened.columns(x, scale_inv, source, self.slots.input)

    def multiply_wgrad(self, opened: "_Grouped", a: Copy, b: Copy, gemm: Gemm, dtype: torch.dtype | None) -> Tensor:
        *operands, alpha = operands_of(a, b, gemm)
        if dtype is None and self._native(gemm, a.data, opened.given):
            return library.grouped_wgrad(*operands, opened.starts, opened.tiles, gemm, alpha)  # type: ignore[call-arg, arg-type]
        of_weight = opened.given.weight_dtype
        made = dtype or made_dtype(self.out_dtype, of_weight)
        return ops.grouped_wgrad(*operands, opened.starts, gemm, made, alpha).to(dtype or of_weight)  # type: ignore[no-any-return]

    def bias_gradients(self, opened: "_Grouped", dtype: torch.dtype) -> Sequence[Tensor]:
        [dy], tiles = opened.dys, opened.tiles
        padded = grouped.gather_padded(dy, opened.source).view(tiles.shape[0], -1, dy.shape[1])
        sums = padded.sum(1, dtype=torch.float32)
        # Not index_add, whose atomics take four times as long as both sums, and add in another order at each run.
        of_expert = torch.arange(opened.ends.shape[0], device=dy.device, dtype=tiles.dtype)[:, None] == tiles
        total = torch.where(of_expert[:, :, None], sums, sums.new_zeros(())).sum(1)  # (E, N)
        return overflowing_sum(total, self.out_dtype).to(dtype).split(opened.given.sizes, 1)  # type: ignore[no-any-return]

    def _native(self, gemm: Gemm, like: Tensor, given: Given) -> bool:
        """Whether torch's library multiplies microscaled operands."""
        if not gemm.microscaled:
            return False
        program = Program(leaves=leaves(torch.ops.te_inductor.exported_grouped_linears.default))
        sizes = Sizes(None, None, None, experts=0)
        problem = Problem(
            targets.of(like.device), sizes, gemm, self.out_dtype, program=program, held=given.weight_dtype
        )
        return select(problem).family is grouped_mm.LIBRARY

    def _weight_scales(self, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """scale and scale_inv where one expert has one, or each of its columns; the amax where scales have two levels."""
        quantizer = self.slots.weight
        if not quantizer.granularity.whole:
            return None, None, _amax(weights) if quantizer.granularity.two_level else None
        known = self.pair("weight", [weight.flatten(0, 1) for weight in weights])
        return (*ops.experts_scale(weights, quantizer), None) if known is None else (known.scale, known.scale_inv, None)

    def _weight_copy(self, weights: Sequence[Tensor], scales: Sequence[Tensor | None], transposed: bool) -> Copy:
        """(E, N, K), or (E, K, N), for all weights."""
        quantizer, (scale, scale_inv, amax) = self.slots.weight, scales
        across = 2 if transposed else 1
        if scale is not None and scale_inv is not None:
            made = [ops.quantize_experts_delayed(weight, scale, quantizer, transposed) for weight in weights]
            experts = weights[0].shape[0]
            return Copy(
                cat_bytes(made, across), scale_inv if scale_inv.dim() else scale_inv.expand(experts).contiguous()
            )
        pairs = [ops.quantize_experts(weight, quantizer, amax, transposed) for weight in weights]
        data, inverses = zip(*pairs, strict=True)
        if len(pairs) == 1:
            return Copy(data[0], inverses[0], amax)
        # Square blocks: each weight's are a matrix (R / 128, C / 128) an expert.
        blocks = [
            inverse.view(one.shape[0], *quantizer.granularity.blocks(one.shape[1], one.shape[2]))
            for one, inverse in zip(data, inverses, strict=True)
        ]
        return Copy(cat_bytes(data, across), torch.cat(blocks, across).flatten(1), amax)


@dataclass(frozen=True)
class _Grouped(Opened):
    """A backward of experts: Note [Padded groups] says what `layout` has returned."""

    tiles: Tensor
    source: Tensor
    ends: Tensor

    def columns(self, x: Tensor, scale_inv: Tensor | None, source: Tensor, quantizer: Quantizer) -> Copy:
        """The transposed copy with padded groups: of a row copy, if its scale is everybody's, else of the values."""
        if scale_inv is not None:
            return Copy(ops.transpose_groups(x, source), scale_inv)
        if quantizer.granularity.microscaled:
            rows = grouped.gather_padded(x, source)
            return copies([rows], 0, quantizer, None, rowwise=False, columnwise=True)[1]  # type: ignore[return-value]
        return Copy(*ops.quantize_groups(x, source, self.tiles, self.starts, quantizer))


def _sent(copy: Copy, operand: BoundOperand, ends: Tensor) -> Copy:
    """The copy of rows as the experts see them; of those that come from other ranks zeros behind the last group."""
    if operand.ranks is None:
        return copy
    return Copy(ops.mask_copy(operand.forth(copy.data), ends), copy.scale_inv)


def _picked(copy: Copy, quantizer: Quantizer, rows: Tensor, places: Tensor | None, shape: torch.Size) -> Copy:
    """The copy of a tensor's rows, of that of the tensor (R, C): exact, as a row's scales are its own or everybody's."""
    data = take_bytes(copy.data, rows) if places is None else place_rows(copy.data, rows, places)
    scale_inv = grouped.gather_scales(copy.scale_inv, quantizer.granularity, rows, shape)
    amax = copy.amax[rows] if copy.amax is not None and copy.amax.dim() else copy.amax
    return Copy(data, scale_inv, amax)


def _stored_columns(data: Tensor, columns: int) -> Tensor:
    """A row copy without its padding, which would be rows of the transpose."""
    return data if data.shape[1] == columns else data[:, :columns]


def _amax(weights: Sequence[Tensor]) -> Tensor:
    amaxes = [tensor_amax(weight.flatten(0, 1)) for weight in weights]
    return torch.stack(amaxes).amax() if len(amaxes) > 1 else amaxes[0]
