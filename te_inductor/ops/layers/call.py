"""The op `layers`, traced, so that Inductor sees casts and GEMMs; and what a saved program can hold in its place."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import compat
from te_inductor.ops.delayed import record_amax
from te_inductor.ops.layers.dense import DenseLayers
from te_inductor.ops.layers.experts import ExpertLayers
from te_inductor.ops.layers.layer import LayerSpec, flat
from te_inductor.ops.layers.losses import LossLayers
from te_inductor.ops.layers.operands import of_shards
from te_inductor.ops.layers.parts import StepTensors, is_empty
from te_inductor.ops.written_out import for_program
from te_inductor.recipes import Slots
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import Written


def trace_layers(
    x: Tensor,  # (..., K), or a DTensor; of experts (M, K), rows sorted by group, or, with `rows`, (T, K)
    weights: Sequence[Tensor],  # each (N, K), or (E, N, K)
    biases: Sequence[Tensor],  # each (N,), or (E, N); none, or one a weight
    spec: LayerSpec,
    out_dtype: torch.dtype,
    token: Tensor | None = None,  # what `delayed_step` returned
    ends: Tensor | None = None,  # (E,) int32, where each group of experts' rows ends
    rows: Tensor | None = None,  # (M,) int64, the rows of x that are multiplied
    places: Tensor | None = None,  # (T, M / T) int64, where among `rows` each row of x stands
    known: Sequence[Tensor] | None = None,  # of the scale source: scale, scale_inv of its slots, all ()
    grad_amax: Tensor | None = None,  # in which the backward records the gradients' amax
    of_input: Sequence[Tensor] | None = None,  # what the operands want besides, as their classes say
    of_weight: Sequence[Tensor] | None = None,
    of_output: Sequence[Tensor] | None = None,
    input_sizes: Sequence[int | torch.SymInt] | None = None,
    output_sizes: Sequence[int | torch.SymInt] | None = None,
    takers: Sequence[Tensor] | None = None,  # of the gradient sink, one a weight
    labels: Tensor | None = None,  # (M,) int64, of the loss
) -> list[Tensor]:  # each (..., N); of experts zeros behind the last group; DTensors, or what this rank has of them
    """``x @ weight.T + bias`` for each weight, the operands of all three GEMMs in the low precision of ``spec.slots``;
    of experts ``x[rows][m] @ weight[g].T + bias[g]``, g being the group of row m; of a loss the cross entropy of each
    row of that, (M,) in fp32. Several weights, each with a multiple of 16 rows, share their scale, as their gradients
    do, and each of their GEMMs is one."""
    if is_empty(x) and ends is None and spec.loss is None and spec.parallel is None:
        return _of_no_rows(x, weights, biases, out_dtype, token)
    kind: Any = DenseLayers if ends is None else ExpertLayers
    if spec.loss is not None:
        kind = partial(LossLayers, loss=spec.loss)
    made = kind(
        spec,
        out_dtype,
        len(weights),
        spec.input.bound(of_input or (), input_sizes or ()),
        spec.weight.bound(of_weight or (), ()),
        spec.output.bound(of_output or (), output_sizes or ()),
        StepTensors(known or (), grad_amax),
        takers or (),
    )
    layers = spec.sink.around(made, made.takers)
    if spec.parallel is not None:
        return of_shards(layers, spec.parallel, x, token, weights, biases, () if labels is None else (labels,))
    if ends is not None:
        return list(layers(x, token, ends, rows, places, *weights, *biases))
    if spec.loss is not None:
        return list(layers(x, None, labels, *weights, *biases))
    ys = layers(x.reshape(-1, x.shape[-1]), token, *weights, *biases)
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


def _of_no_rows(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], out_dtype: torch.dtype, token: Tensor | None
) -> list[Tensor]:
    """Layers of an empty batch, which have nothing to cast; the step ends behind their backward all the same, as other
    ranks may have rows."""
    ys = []
    for weight, bias in zip_longest(weights, biases):
        tensors = [one if one is None else one.to(out_dtype) for one in (x, weight, bias)]
        ys.append(F.linear(*tensors))  # type: ignore[arg-type]
    return ys if token is None else [y + token.to(out_dtype) for y in ys]


layers = op_of(trace_layers, name="layers")


def _exported_linears(
    x: Tensor,  # (..., K)
    weights: Sequence[Tensor],  # each (N, K)
    biases: Sequence[Tensor],  # each (N,); none, or one a weight
    slots: str,  # as Slots.to_text writes them
    out_dtype: torch.dtype,
) -> list[Tensor]:  # each (..., N)
    """Dense layers as a saved program can hold them."""
    with for_program(exported_linears):
        return trace_layers(x, weights, biases, LayerSpec(Slots.from_text(slots)), out_dtype)


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
    """Experts as a saved program can hold them."""
    with for_program(exported_grouped_linears):
        spec = LayerSpec(Slots.from_text(slots))
        return trace_layers(x, weights, biases, spec, out_dtype, ends=ends, rows=rows, places=places)


exported_linears = op_of(_exported_linears, name="exported_linears")
exported_grouped_linears = op_of(_exported_grouped_linears, name="exported_grouped_linears")


def _record_shard_amax(pieces: list[Tensor], amax: Written) -> None:
    record_amax([flat(compat.local_of(piece).detach()) for piece in pieces], amax)


record_shard_amax = op_of(_record_shard_amax, name="record_shard_amax")
