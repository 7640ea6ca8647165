"""Linear layers in low precision whose tensors are sharded over several ranks: Note [Tensor-parallel layers] in
distributed/parallel.py. Traced, as `linears` is."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.compat import constant_type_name
from te_inductor.distributed.parallel import Parallel, gather, largest, reduce
from te_inductor.ops.casts import Copy, ScalePair, copies, current_scale, tensor_amax, transpose
from te_inductor.ops.definition import define
from te_inductor.ops.delayed import DelayedScales, record_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.gemm import product
from te_inductor.ops.linear import bias_gradient, laid_out_gradients, save_copies, step_of, wgrad
from te_inductor.recipes import Quantizer, Slots
from te_inductor.recipes.delayed import DelayedScaling


@dataclass(frozen=True)
class ParallelLinears(Operation):
    """The layers of one input. Inputs: x (…, K), the step's token or None, `count` weights (N, K), then their biases
    (N,) if they have any; all of this rank alone. Saved for backward: the columnwise copies of x, gathered, and of w."""

    slots: Slots
    out_dtype: torch.dtype
    parallel: Parallel
    count: int = 1
    step: DelayedScales | None = None

    def compute(
        self, needs: Needs, x: Tensor, token: Tensor | None, *operands: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        weights, biases = operands[: self.count], operands[self.count :]
        wanted = needs[-len(operands) :]
        x_grad, weight_grad, bias_grad = needs[0], any(wanted[: self.count]), any(wanted[self.count :])
        slots, parallel = self.slots, self.parallel
        x_row, x_col, rows = self._copies([x], "input", parallel.gathered, rowwise=True, columnwise=weight_grad)
        w_rows, w_cols = self._weights(weights, x_grad)
        ys: list[Tensor] = []
        for w_row, own in zip(w_rows, self._biases(biases, len(w_rows)), strict=True):
            bias = (torch.cat(list(own)) if len(own) > 1 else own[0]) if own else None
            early = None if parallel.reduces else bias
            y = product(x_row, w_row, early, slots.fprop, self.out_dtype)
            y = y.reshape(*rows, y.shape[1])
            if parallel.reduces:
                y = reduce(y, parallel.y, parallel)
                y = y if bias is None else y + bias.to(self.out_dtype)
            ys.append(y)
        if len(ys) < self.count:
            ys = list(ys[0].split([weight.shape[0] for weight in weights], -1))
        return tuple(ys), (x_col, w_cols, (x_grad, weight_grad, bias_grad))

    def _weights(self, weights: Sequence[Tensor], columnwise: bool) -> tuple[list[Copy | None], list[Copy | None]]:
        """Their copies, of one weight a GEMM: all of them one below the other, or, where they were gathered in low
        precision, each with the scale that it was cast with."""
        if isinstance(weights[0], GatheredWeight):
            pairs: Any = [weight.copies(columnwise) for weight in weights]  # type: ignore[attr-defined]
        else:
            pairs = [self._copies(weights, "weight", None, rowwise=True, columnwise=columnwise)[:2]]
        return [row for row, _ in pairs], [column for _, column in pairs]

    def _biases(self, biases: Sequence[Tensor], gemms: int) -> list[Sequence[Tensor]]:
        """Those of each GEMM."""
        if gemms == 1 or not biases:
            return [biases] * gemms
        return [[bias] for bias in biases]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        save_copies(ctx, self.count, inputs, found)

    def backward(self, ctx: Any, *dys: Tensor) -> Gradients:
        x_grad, weight_grad, bias_grad = ctx.needs
        saved = ctx.saved_tensors
        x_col, *w_cols = (Copy(*saved[place : place + 3]) for place in range(0, len(saved), 3))
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        slots, parallel, dx = self.slots, self.parallel, None
        dws: Sequence[Tensor | None] = [None] * len(dys)
        if x_grad or weight_grad:
            g_rows, g_col, rows = self._gradients(dys, len(w_cols), x_grad, weight_grad)
            if self.step is not None:
                record_amax([_flat(dy) for dy in dys], self.step.grad_amax)
        if x_grad:
            dxs = [product(*pair, None, slots.dgrad, self.out_dtype) for pair in zip(g_rows, w_cols, strict=True)]
            dx = functools.reduce(torch.add, dxs)
            dx = dx.reshape(*rows, dx.shape[1])
            if parallel.gathers:
                dx = reduce(dx, parallel.x, parallel)
            dx = dx.to(x_dtype)
        if weight_grad:
            made = torch.float16 if self.out_dtype == torch.float16 else weight_dtype
            multiply = functools.partial(wgrad, made=made, dtype=weight_dtype)
            dws = laid_out_gradients(multiply, g_col, x_col, slots.wgrad, ctx.sizes, ctx.turned)
        dbs: Sequence[Tensor | None] = [] if bias_dtype is None else [None] * len(dys)
        if bias_grad:
            dbs = [bias_gradient(_flat(dy), self.out_dtype).to(bias_dtype) for dy in dys]
        return dx, None, *dws, *dbs

    def _gradients(
        self, dys: Sequence[Tensor], gemms: int, rowwise: bool, columnwise: bool
    ) -> tuple[list[Copy | None], Copy | None, Sequence[Any]]:
        """Copies of dy for dgrad, one a GEMM, and for wgrad, which is one GEMM; with one scale. A layer whose sums are
        scattered is one GEMM."""
        dim, quantizer = self.parallel.scattered, self.slots.grad_output
        if gemms == 1:
            row, column, rows = self._copies(dys, "grad_output", dim, rowwise=rowwise, columnwise=columnwise)
            return [row], column, rows
        flat = [_flat(dy) for dy in dys]
        known = self._known("grad_output", flat, None)
        if known is None and quantizer.granularity.whole:
            known = ScalePair(*current_scale(flat, quantizer))
        found: list[Copy | None] = [None] * gemms
        if rowwise:
            found = [copies([dy], 1, quantizer, known, columnwise=False)[0] for dy in flat]
        column = copies(flat, 1, quantizer, known, rowwise=False, columnwise=True)[1] if columnwise else None
        return found, column, list(dys[0].shape[:-1])

    def _copies(
        self, pieces: Sequence[Tensor], slot: str, dim: int | None, *, rowwise: bool, columnwise: bool
    ) -> tuple[Copy | None, Copy | None, Sequence[Any]]:
        """The copies of pieces (…, C) side by side in their last dimension, weights one below the other, that all
        ranks have along `dim` if they are gathered; and the sizes in front of the last."""
        quantizer: Quantizer = getattr(self.slots, slot)
        side = 0 if slot == "weight" else 1
        if dim is not None and not quantizer.granularity.whole:
            pieces, dim = [gather(piece, dim, self.parallel) for piece in pieces], None
        rows = list(pieces[0].shape[:-1])
        flat = [_flat(piece) for piece in pieces]
        known = self._known(slot, flat, dim)
        if dim is None:
            return *copies(flat, side, quantizer, known, rowwise=rowwise, columnwise=columnwise), rows
        assert known is not None
        row, _ = copies(flat, side, quantizer, known, columnwise=False)
        assert row is not None  # it was asked for
        data = gather(row.data.view(*rows, row.data.shape[1]), dim, self.parallel)
        rows[dim] = rows[dim] * self.parallel.ranks
        row = Copy(_flat(data), known.scale_inv)
        columns = sum(piece.shape[1] for piece in flat)
        return row, Copy(transpose(row.data, columns), row.scale_inv) if columnwise else None, rows

    def _known(self, slot: str, flat: Sequence[Tensor], dim: int | None) -> ScalePair | None:
        """What is known of a scale before the cast. What all ranks gather has one: where no step knows it, that of the
        largest amax of all shards. In a first step all tensors do, so that it begins the histories of one rank."""
        quantizer: Quantizer = getattr(self.slots, slot)
        first = self.step is not None and self.step.first is not None
        shared = first or (self.step is None and dim is not None)
        told = [self._largest(flat).view(1, 1)] if shared else flat
        if self.step is not None:
            return self.step.known(slot, told, quantizer)
        return ScalePair(*current_scale(told, quantizer)) if shared else None

    def _largest(self, pieces: Sequence[Tensor]) -> Tensor:  # () fp32
        amaxes = [tensor_amax(piece) for piece in pieces]
        return largest(torch.stack(amaxes).amax() if len(amaxes) > 1 else amaxes[0], self.parallel)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def trace_parallel_linears(
    x: Tensor,  # a DTensor, (..., K)
    weights: Sequence[Tensor],  # DTensors, each (N, K)
    biases: Sequence[Tensor],  # DTensors, each (N,); none, or one a weight
    slots: Slots,
    out_dtype: torch.dtype,
    parallel: Parallel,
    known: Sequence[Tensor] | None = None,  # as of `linears`
    token: Tensor | None = None,
    grad_amax: Tensor | None = None,
) -> list[Tensor]:  # each (..., N); DTensors, or what this rank has of them
    """`linears` of DTensors, with the redistributions in front of and behind it."""
    step = step_of(weights, known, token, grad_amax)
    return _layers(ParallelLinears(slots, out_dtype, parallel, len(weights), step), x, token, weights, biases)


def trace_first_parallel_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    slots: Slots,
    out_dtype: torch.dtype,
    parallel: Parallel,
    recipe: DelayedScaling,
    token: Tensor | None = None,
    grad_amax: Tensor | None = None,
) -> list[Tensor]:
    """The same in a first step under delayed scaling: Note [A first step]."""
    step = DelayedScales(token=token, grad_amax=grad_amax, first=recipe)
    return _layers(ParallelLinears(slots, out_dtype, parallel, len(weights), step), x, token, weights, biases)


def _layers(
    layers: ParallelLinears, x: Any, token: Tensor | None, weights: Sequence[Any], biases: Sequence[Any]
) -> list[Tensor]:
    """On what this rank has of the operands; gradients are DTensors of the placements that each operand's have."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    parallel, mesh = layers.parallel, x.device_mesh
    shard = None if parallel.x is None else Shard(parallel.x)
    # A whole operand of which each rank computes a part of the gradient has partial sums of it.
    whole_x = Partial() if parallel.weight == 0 else Replicate()
    whole_weight = Replicate() if shard is None else Partial()
    weight = whole_weight if parallel.weight is None else Shard(parallel.weight)
    scattered = parallel.reduces and parallel.y is not None
    bias = (
        Shard(0)
        if parallel.weight == 0
        else Partial()
        if scattered
        else whole_weight
        if parallel.weight is None
        else Replicate()
    )
    local = x.to_local(grad_placements=[shard or whole_x])
    ys = layers(
        local,
        token,
        *(one.to_local(grad_placements=[weight]) for one in weights),
        *(one.to_local(grad_placements=[bias]) for one in biases),
    )
    if parallel.local:
        return list(ys)
    if parallel.weight == 0:
        placement: Any = Shard(ys[0].dim() - 1)
    elif parallel.weight == 1:
        placement = Partial() if not parallel.reduces else Replicate() if parallel.y is None else Shard(parallel.y)
    else:
        placement = shard or Replicate()
    return [DTensor.from_local(y, mesh, [placement], run_check=False) for y in ys]


_OPERANDS = (
    f"Tensor x, Tensor[] weights, Tensor[] biases, {constant_type_name(Slots)} slots, ScalarType out_dtype,"
    f" {constant_type_name(Parallel)} parallel"
)
parallel_linears = define(
    f"parallel_linears({_OPERANDS}, Tensor[]? known=None, Tensor? token=None, Tensor? grad_amax=None) -> Tensor[]",
    trace_parallel_linears,
)
first_parallel_linears = define(
    f"first_parallel_linears({_OPERANDS}, {constant_type_name(DelayedScaling)} recipe, Tensor? token=None, Tensor?"
    " grad_amax=None) -> Tensor[]",
    trace_first_parallel_linears,
)
record_shard_amax = define(
    "record_shard_amax(Tensor[] pieces, Tensor(a!) amax) -> ()",
    lambda pieces, amax: record_amax([_flat(compat.local_of(piece).detach()) for piece in pieces], amax),
)
