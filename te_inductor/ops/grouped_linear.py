"""Linear layers of experts in low precision, made of the other ops: traced, so that Inductor sees casts and GEMMs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.compat import constant_type_name
from te_inductor.distributed.exchange import Exchange
from te_inductor.distributed.parallel import largest
from te_inductor.kernels import grouped_library
from te_inductor.kernels.problem import Problem, Program, Sizes
from te_inductor.kernels.select import select
from te_inductor.ops import grouped as ops
from te_inductor.ops.casts import Copy, ScalePair, copies, current_scale, quantize_delayed, tensor_amax
from te_inductor.ops.definition import define
from te_inductor.ops.delayed import DelayedScales, record_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gemm import operands_of
from te_inductor.ops.linear import is_turned, laid_out_gradients, overflowing_sum
from te_inductor.ops.permutations import place_rows, take_bytes
from te_inductor.ops.written_out import for_program, leaves
from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.recipes.delayed import DelayedScaling
from te_inductor.recipes.formats import ROW
from te_inductor.runtime.eager import grouped
from te_inductor.templates import grouped_library as library

_SLOTS = constant_type_name(Slots)


@dataclass(frozen=True)
class GroupedLinears(Operation):
    """Linear layers of E experts each, of one input, one GEMM for all of a kind; traced, so its body becomes nodes of
    the forward and backward graphs. Layers whose weights are w₁, w₂, … are one layer whose weights are all of their
    rows.

    Inputs: x (T, K), the step's token or None, ends (E,), rows (M,) or None: which rows of x the experts see, places
    (T, M / T) or None: where each row of x is among those; `count` weights (E, N, K), then their biases (E, N) if they
    have any. Saved for backward: with one scale a tensor, x's row copy, whose bytes wgrad transposes; else x itself, as
    scales of wgrad's operands belong to a group's columns. The backward casts weights again, which stay in memory
    anyway, unless their copies are kept."""

    slots: Slots
    out_dtype: torch.dtype
    count: int = 1
    step: DelayedScales | None = None
    kept: Sequence[Tensor] = ()  # the weights' copies, as `CachedWeight.taken` has them
    main_grads: Sequence[Tensor] = ()
    tickets: Sequence[Tensor] = ()
    arrives: Exchange | None = None  # how x comes to the experts: Note [Rows between ranks]
    leaves: Exchange | None = None  # how y goes back

    def compute(
        self,
        needs: Needs,
        x: Tensor,
        token: Tensor | None,
        ends: Tensor,
        rows: Tensor | None,
        places: Tensor | None,
        *operands: Tensor,
    ) -> tuple[tuple[Tensor, ...], Any]:
        weights, biases = operands[: self.count], operands[self.count :]
        wanted = needs[-len(operands) :]
        needed = needs[0], any(wanted[: self.count]), any(wanted[self.count :])
        slots = self.slots
        known = self._known("input", x, self.arrives)
        row, _ = copies([x], 0, slots.input, known, columnwise=False)
        assert row is not None
        row = row if self.arrives is None else _exchanged(row, self.arrives, ends)
        # Without a gradient of x nobody else wants the places, which are a sort's inverse.
        a = row if rows is None else _picked(row, slots.input, rows, places if needs[0] else None, x.shape)
        b, scales = self._row_copy(weights, needed[0])
        bias = torch.cat(list(biases), 1) if len(biases) > 1 else biases[0] if biases else None
        native = self._native(slots.fprop, x, weights[0].dtype)
        y = _product(a, b, ends, bias, slots.fprop, self.out_dtype, native)
        y = y if self.leaves is None else self.leaves.from_experts(y, added=False)
        ys = y.split([weight.shape[1] for weight in weights], 1) if self.count > 1 else (y,)
        return ys, (row, scales, needed)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, _, ends, rows, places, *operands = inputs
        weights, biases = operands[: self.count], operands[self.count :]
        row, scales, ctx.needs = found
        of_x = (row.data, row.scale_inv) if self.slots.input.granularity.whole else (x, None)
        # Of weights whose column copies are kept the backward reads nothing else.
        column = self.kept[2:] or (None, None)
        ctx.save_for_backward(*of_x, *scales, ends, rows, places, *column, *(() if self.kept[2:] else weights))
        ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
        ctx.sizes, ctx.width = [w.shape[1] for w in weights], weights[0].shape[2]
        ctx.turned = all(map(is_turned, weights))

    def backward(self, ctx: Any, *dys: Tensor) -> Gradients:
        x_grad, weight_grad, bias_grad = ctx.needs
        saved = ctx.saved_tensors  # once: each access unpacks them
        x, x_scale_inv, *scales, ends, rows, places = saved[:8]
        column, weights = saved[8:10], saved[10:]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        slots, step, dx, sizes = self.slots, self.step, None, ctx.sizes
        dy = torch.cat(list(dys), 1) if len(dys) > 1 else dys[0]
        dy = dy if self.leaves else grouped.mask_rows(dy, ends)
        native = self._native(slots.wgrad, dy, weight_dtype)
        seen = dy.shape[0] if self.leaves is None else x.shape[0]
        layout = grouped.layout(ends, seen, grouped.GROUP_ALIGNMENT if native else 0)
        dws: Sequence[Tensor | None] = [None] * len(sizes)
        if x_grad or weight_grad:
            known = self._known("grad_output", dy, self.leaves)
            g_row, g_col = self._gradient_copies(dy, known, layout, ends, x_grad, weight_grad)
            if step is not None:
                record_amax([dy], step.grad_amax)
        if x_grad:
            b = self._weight_copy(weights, scales, transposed=True) if weights else Copy(*column)
            native = self._native(slots.dgrad, dy, weight_dtype)
            dx = _product(g_row, b, ends, None, slots.dgrad, self.out_dtype, native)
            if self.arrives is not None:
                dx = self.arrives.from_experts(dx, added=True)
            if places is not None:  # in fp32, row by row of x, where autograd adds rows in the order of atomics
                dx = dx[places].sum(1, dtype=torch.float32)
            dx = dx.to(x_dtype)
        if weight_grad:
            starts, tiles, source = layout
            if rows is not None:
                source = torch.where(source >= 0, rows[source.clamp(min=0)], -1).int()
            x = x if x_scale_inv is None else _stored_columns(x, ctx.width)
            x_col = _columns(x, x_scale_inv, source, tiles, starts, slots.input)
            dws = self._weight_gradients(ctx, g_col, x_col, layout, weight_dtype)
        dbs: Sequence[Tensor | None] = [None] * (0 if bias_dtype is None else len(dys))
        if bias_grad:
            dbs = _bias_gradients(dy, layout, ends.shape[0], self.out_dtype).to(bias_dtype).split(sizes, 1)
        return dx, None, None, None, None, *dws, *dbs

    def _known(self, slot: str, x: Tensor, exchange: Exchange | None) -> ScalePair | None:
        """What x is cast with, where that does not follow from x alone: what is exchanged has one scale on all ranks.
        In a first step all tensors do, so that it begins the histories of one rank."""
        quantizer: Quantizer = getattr(self.slots, slot)
        first = self.step is not None and self.step.first is not None
        among = exchange or ((self.arrives or self.leaves) if first else None)
        if among is not None and (self.step is None or first):
            x = largest(tensor_amax(x), among.ranks).view(1, 1).to(x.dtype)
        if self.step is not None:
            return self.step.known(slot, [x], quantizer)
        return ScalePair(*current_scale([x], quantizer)) if among is not None else None

    def _native(self, gemm: Gemm, x: Tensor, weight: torch.dtype) -> bool:
        """Whether torch's library multiplies microscaled operands."""
        if not gemm.microscaled:
            return False
        program, sizes = Program(leaves=leaves(exported_grouped_linears)), Sizes(None, None, None, experts=0)
        problem = Problem(targets.of(x.device), sizes, gemm, self.out_dtype, program=program, held=weight)
        return select(problem).family is grouped_library.FAMILY

    def _row_copy(
        self, weights: Sequence[Tensor], x_grad: bool
    ) -> tuple[Copy, tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """fprop's copy, and the scales with which the backward casts."""
        if self.kept:
            cast = x_grad and len(self.kept) == 2
            return Copy(self.kept[0], self.kept[1]), self._weight_scales(weights) if cast else (None, None, None)
        if x_grad and self.slots.weight.granularity is ROW and len(weights) == 1 and weights[0].is_contiguous():
            data, scale_inv, *of_columns = ops.quantize_experts_rows(weights[0], self.slots.weight)
            return Copy(data, scale_inv), (*of_columns, None)  # type: ignore[return-value]
        scales = self._weight_scales(weights)
        return self._weight_copy(weights, scales, transposed=False), scales

    def _weight_scales(self, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """scale and scale_inv where one expert has one, or each of its columns; the amax where scales have two levels."""
        quantizer, step = self.slots.weight, self.step
        if not quantizer.granularity.whole:
            amax = _amax(weights) if quantizer.granularity.two_level else None
            return None, None, amax
        if step is None:
            return *ops.experts_scale(weights, quantizer), None
        among = (self.arrives or self.leaves) if step.first is not None else None
        told = [weight.flatten(0, 1) for weight in weights]
        if among is not None:
            told = [largest(_amax(weights), among.ranks).view(1, 1).to(weights[0].dtype)]
        known = step.known("weight", told, quantizer)
        assert known is not None
        return known.scale, known.scale_inv, None

    def _weight_copy(self, weights: Sequence[Tensor], scales: Sequence[Tensor | None], transposed: bool) -> Copy:
        """(E, N, K), or (E, K, N), for all weights."""
        quantizer, (scale, scale_inv, amax) = self.slots.weight, scales
        across = 2 if transposed else 1
        if scale is not None and scale_inv is not None:
            made = [ops.quantize_experts_delayed(weight, scale, quantizer, transposed) for weight in weights]
            experts = weights[0].shape[0]
            return Copy(_cat(made, across), scale_inv if scale_inv.dim() else scale_inv.expand(experts).contiguous())
        pairs = [ops.quantize_experts(weight, quantizer, amax, transposed) for weight in weights]
        data, inverses = zip(*pairs, strict=True)
        if len(pairs) == 1:
            return Copy(data[0], inverses[0], amax)
        # Square blocks: each weight's are a matrix (R / 128, C / 128) an expert.
        blocks = [
            inverse.view(one.shape[0], *quantizer.granularity.blocks(one.shape[1], one.shape[2]))
            for one, inverse in zip(data, inverses, strict=True)
        ]
        return Copy(_cat(data, across), torch.cat(blocks, across).flatten(1), amax)

    def _gradient_copies(
        self,
        dy: Tensor,
        known: ScalePair | None,
        layout: tuple[Tensor, Tensor, Tensor],
        ends: Tensor,
        rowwise: bool,
        columnwise: bool,
    ) -> tuple[Copy | None, Copy | None]:
        quantizer, (starts, tiles, source) = self.slots.grad_output, layout
        if quantizer.granularity.whole:
            scale, scale_inv = (known.scale, known.scale_inv) if known else current_scale([dy], quantizer)
            row = Copy(quantize_delayed(dy, scale, quantizer), scale_inv)
            row = row if self.leaves is None else _exchanged(row, self.leaves, ends)
            data, scale_inv = _stored_columns(row.data, dy.shape[1]), row.scale_inv
        else:
            row = copies([dy], 0, quantizer, None, columnwise=False)[0] if rowwise else None  # type: ignore[assignment]
            data, scale_inv = dy, None  # type: ignore[assignment]
        column = _columns(data, scale_inv, source, tiles, starts, quantizer) if columnwise else None
        return row, column

    def _weight_gradients(
        self, ctx: Any, g_col: Copy | None, x_col: Copy, layout: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
    ) -> Sequence[Tensor | None]:
        """What autograd gets of them."""
        gemm, (starts, tiles, _) = self.slots.wgrad, layout
        if not (self.tickets or self.main_grads):
            made = torch.float16 if self.out_dtype == torch.float16 else dtype  # as ops/linear.py has it

            def multiply(a: Copy, b: Copy, gemm: Gemm) -> Tensor:
                *operands, alpha = operands_of(a, b, gemm)
                if self._native(gemm, starts, dtype):
                    return library.grouped_wgrad(*operands, starts, tiles, gemm, alpha)  # type: ignore[call-arg, arg-type]
                return ops.grouped_wgrad(*operands, starts, gemm, made, alpha).to(dtype)  # type: ignore[no-any-return]

            return laid_out_gradients(multiply, g_col, x_col, gemm, ctx.sizes, ctx.turned)
        *operands, alpha = operands_of(g_col, x_col, gemm)
        if self.tickets:
            ops.defer_grouped_wgrad(self.tickets, *operands, starts, alpha, gemm)
        else:
            ops.accumulate_grouped_wgrad(self.main_grads, *operands, starts, alpha, gemm)
        return [None] * len(ctx.sizes)


def _exchanged(copy: Copy, exchange: Exchange, ends: Tensor) -> Copy:
    """The copy of rows as the experts see them; zeros behind the last group."""
    return Copy(ops.mask_copy(exchange.to_experts(copy.data), ends), copy.scale_inv)


def _product(
    a: Copy | None,
    b: Copy,
    ends: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
    native: bool,
) -> Tensor:
    *operands, alpha = operands_of(a, b, gemm)
    if native:
        return library.grouped_mm(*operands, ends, bias, gemm, alpha)  # type: ignore[call-arg, arg-type]
    return ops.grouped_mm(*operands, ends, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]


def _picked(copy: Copy, quantizer: Quantizer, rows: Tensor, places: Tensor | None, shape: torch.Size) -> Copy:
    """The copy of a tensor's rows, of that of the tensor (R, C): exact, as a row's scales are its own or everybody's."""
    data = take_bytes(copy.data, rows) if places is None else place_rows(copy.data, rows, places)
    scale_inv = grouped.gather_scales(copy.scale_inv, quantizer.granularity, rows, shape)
    amax = copy.amax[rows] if copy.amax is not None and copy.amax.dim() else copy.amax
    return Copy(data, scale_inv, amax)


def _columns(
    x: Tensor, scale_inv: Tensor | None, source: Tensor, tiles: Tensor, starts: Tensor, quantizer: Quantizer
) -> Copy:
    """The transposed copy with padded groups: of a row copy, if its scale is everybody's, else of the values."""
    if scale_inv is not None:
        return Copy(ops.transpose_groups(x, source), scale_inv)
    if quantizer.granularity.microscaled:
        column = copies([grouped.gather_padded(x, source)], 0, quantizer, None, rowwise=False, columnwise=True)[1]
        assert column is not None
        return column
    return Copy(*ops.quantize_groups(x, source, tiles, starts, quantizer))


def _stored_columns(data: Tensor, columns: int) -> Tensor:
    """A row copy without its padding, which would be rows of the transpose."""
    return data if data.shape[1] == columns else data[:, :columns]


def _amax(weights: Sequence[Tensor]) -> Tensor:
    amaxes = [tensor_amax(weight.flatten(0, 1)) for weight in weights]
    return torch.stack(amaxes).amax() if len(amaxes) > 1 else amaxes[0]


def _cat(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Of bytes, as FP8 tensors have no `cat` on every device."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(pieces[0].dtype)


def _bias_gradients(
    dy: Tensor, layout: tuple[Tensor, Tensor, Tensor], experts: int, dtype: torch.dtype
) -> Tensor:  # (E, N) fp32
    _, tiles, source = layout
    partial = grouped.gather_padded(dy, source).view(tiles.shape[0], -1, dy.shape[1]).sum(1, dtype=torch.float32)
    # Not index_add, whose atomics take four times as long as both sums, and add in another order at each run.
    of_expert = torch.arange(experts, device=dy.device, dtype=tiles.dtype)[:, None] == tiles
    total = torch.where(of_expert[:, :, None], partial, partial.new_zeros(())).sum(1)
    return overflowing_sum(total, dtype)


def _layers(
    layers: GroupedLinears,
    x: Tensor,
    token: Tensor | None,
    ends: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> list[Tensor]:
    return list(layers(x, token, ends, rows, places, *weights, *biases))


def trace_grouped_linears(
    x: Tensor,  # (M, K), rows sorted by group; or, with `rows`, (T, K)
    weights: Sequence[Tensor],  # each (E, N, K)
    biases: Sequence[Tensor],  # each (E, N); none, or one a weight
    ends: Tensor,  # (E,) int32, where each group ends
    slots: Slots,
    out_dtype: torch.dtype,
    rows: Tensor | None = None,  # (M,) int64, the rows of x that are multiplied
    places: Tensor | None = None,  # (T, M / T) int64, where among `rows` each row of x stands
    known: Sequence[Tensor] | None = None,  # as of `linears`, and so are the others
    token: Tensor | None = None,
    grad_amax: Tensor | None = None,
    kept: Sequence[Tensor] | None = None,
    main_grads: Sequence[Tensor] | None = None,
    tickets: Sequence[Tensor] | None = None,
    *exchanges: Any,
) -> list[Tensor]:  # each (M, N), zeros behind the last group
    """``x[rows][m] @ weight[g].T + bias[g]`` for each weight, g being the group of row m, the operands of all three
    GEMMs in the low precision of `slots`."""
    pairs = [] if known is None else [ScalePair(*pair) for pair in zip(known[::2], known[1::2], strict=True)]
    step = DelayedScales(*pairs, *([token, grad_amax] if len(pairs) > 2 else [])) if pairs else None  # type: ignore[arg-type]
    layers = GroupedLinears(
        slots, out_dtype, len(weights), step, kept or (), main_grads or (), tickets or (), *_exchanges(*exchanges)
    )
    return _layers(layers, x, token, ends, rows, places, weights, biases)


def trace_first_grouped_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    ends: Tensor,
    slots: Slots,
    out_dtype: torch.dtype,
    recipe: DelayedScaling,
    rows: Tensor | None = None,
    places: Tensor | None = None,
    token: Tensor | None = None,
    grad_amax: Tensor | None = None,
    main_grads: Sequence[Tensor] | None = None,
    tickets: Sequence[Tensor] | None = None,
    *exchanges: Any,
) -> list[Tensor]:
    """The same under delayed scaling, in a step in which some quantizer of the graph has no history: Note [A first
    step]."""
    step = DelayedScales(token=token, grad_amax=grad_amax, first=recipe)
    layers = GroupedLinears(
        slots, out_dtype, len(weights), step, (), main_grads or (), tickets or (), *_exchanges(*exchanges)
    )
    return _layers(layers, x, token, ends, rows, places, weights, biases)


def _exchanges(
    group: str | None = None,  # name of the process group; None: nothing is exchanged
    sent: Sequence[Any] | None = None,  # rows of x to each rank; None: x is there
    received: Sequence[Any] | None = None,
    order: Tensor | None = None,  # (M,), which of the rows that came each row of the layer is
    y_sent: Sequence[Any] | None = None,  # rows to each rank as they are sent forth: of y what comes back from it
    y_received: Sequence[Any] | None = None,
    y_order: Tensor | None = None,
) -> tuple[Exchange | None, Exchange | None]:
    if group is None:
        return None, None
    arrives = None if sent is None or received is None else Exchange(sent, received, group, order)
    leaves = None if y_sent is None or y_received is None else Exchange(y_sent, y_received, group, y_order)
    return arrives, leaves


_EXCHANGES = (
    "str? group=None, SymInt[]? sent=None, SymInt[]? received=None, Tensor? order=None, SymInt[]? y_sent=None,"
    " SymInt[]? y_received=None, Tensor? y_order=None"
)
grouped_linears = define(
    f"grouped_linears(Tensor x, Tensor[] weights, Tensor[] biases, Tensor ends, {_SLOTS} slots, ScalarType out_dtype,"
    " Tensor? rows=None, Tensor? places=None, Tensor[]? known=None, Tensor? token=None, Tensor? grad_amax=None,"
    f" Tensor[]? kept=None, Tensor[]? main_grads=None, Tensor[]? tickets=None, {_EXCHANGES}) -> Tensor[]",
    trace_grouped_linears,
)
first_grouped_linears = define(
    f"first_grouped_linears(Tensor x, Tensor[] weights, Tensor[] biases, Tensor ends, {_SLOTS} slots, ScalarType"
    f" out_dtype, {constant_type_name(DelayedScaling)} recipe, Tensor? rows=None, Tensor? places=None, Tensor?"
    f" token=None, Tensor? grad_amax=None, Tensor[]? main_grads=None, Tensor[]? tickets=None, {_EXCHANGES})"
    " -> Tensor[]",
    trace_first_grouped_linears,
)


def _exported_grouped_linears(
    x: Tensor,  # (M, K), rows sorted by group; or, with `rows`, (T, K)
    weights: Sequence[Tensor],  # each (E, N, K)
    biases: Sequence[Tensor],  # each (E, N); none, or one a weight
    ends: Tensor,  # (E,) int32
    slots: str,  # as Slots.to_text writes them
    out_dtype: torch.dtype,
    rows: Tensor | None = None,
    places: Tensor | None = None,
) -> list[Tensor]:  # each (M, N)
    """`grouped_linears` as a saved program can hold it."""
    with for_program(exported_grouped_linears):
        return trace_grouped_linears(x, weights, biases, ends, Slots.from_text(slots), out_dtype, rows, places)


exported_grouped_linears = define(
    "exported_grouped_linears(Tensor x, Tensor[] weights, Tensor[] biases, Tensor ends, str slots, ScalarType"
    " out_dtype, Tensor? rows=None, Tensor? places=None) -> Tensor[]",
    _exported_grouped_linears,
)


def _equal_groups(like: Tensor, groups: int, rows: int) -> Tensor:
    return torch.arange(1, groups + 1, device=like.device, dtype=torch.int32) * rows


# Where groups of `rows` rows each end, (groups,), where `like` is.
equal_groups = define("equal_groups(Tensor like, int groups, SymInt rows) -> Tensor", _equal_groups)
# `x` (M, ...) with zeros for rows that belong to no group.
mask_rows = define("mask_rows(Tensor x, Tensor ends) -> Tensor", grouped.mask_rows)
