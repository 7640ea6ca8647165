"""Weights that a graph gathers itself, cast before they are. Traced, as `layers` is.

# Note [Graph FSDP]
Where a model gathers its own parameters, as torchtitan's SimpleFSDP does, the gather is a part of the graph::

    shard (a DTensor) -> redistribute(Replicate, forward_dtype) -> to_local -> linear
    gradient of the weight -> cast to backward_dtype -> reduce_scatter -> gradient of the shard

Cast and gather commute, as each rank has whole rows: with one scale a tensor, if all ranks cast with that of the largest
amax of their shards; with scales of blocks, where no block lies in two shards. So each rank casts its own rows and
gathers bytes: half of bf16's, and 1/N of the casts. What the layer multiplies is the same, bit for bit, but for roundings
to `forward_dtype` that generated code leaves out, as it does between any two operators that it fuses.

`current` wants the amaxes of all shards before it casts one: the weights of a graph reduce theirs at once, at its begin.
`delayed` knows its scales. The gradient goes the way that it went, by torch's own redistribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.distributed.parallel import Ranks, gather, largest
from te_inductor.ops.casts import current_scale, quantize, quantize_delayed, tensor_amax
from te_inductor.ops.delayed import record_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.layers.layer import LayerSpec
from te_inductor.ops.layers.parts import ScaledOperand
from te_inductor.recipes import Quantizer
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import Written


@dataclass(frozen=True)
class _Gather(Operation):
    """Inputs: a shard, a DTensor of which this rank has some rows; scale and reciprocal, or None of blocks."""

    quantizer: Quantizer
    dtype: torch.dtype  # which the weight is rounded to before the cast
    backward_dtype: torch.dtype  # in which its gradient is reduced

    def compute(self, needs: Needs, shard: Any, scale: Tensor | None, scale_inv: Tensor | None) -> tuple[Tensor, Any]:
        ranks, local = ranks_of(shard), _rounded(shard, self.dtype)
        if scale is None or scale_inv is None:
            data, scale_inv = quantize(local, self.quantizer)
            scale_inv = gather(scale_inv, 0, ranks)
        else:
            data = quantize_delayed(local, scale, self.quantizer)
        weight = GatheredWeight(gather(data, 0, ranks), scale_inv, shard.shape, self.dtype, None, self.quantizer)
        return weight, None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        ctx.mesh, ctx.placements, ctx.shard_dtype = inputs[0].device_mesh, inputs[0].placements, inputs[0].dtype

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        from torch.distributed.tensor import DTensor, Partial

        partial = DTensor.from_local(
            grads[0].to(self.backward_dtype), ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False
        )
        return partial.redistribute(placements=ctx.placements).to(ctx.shard_dtype), None, None


def trace_gather_weight(
    shard: Tensor,  # a DTensor, (N, K), whose rows are sharded evenly along one dimension of its mesh
    spec: LayerSpec,  # of the layer whose weight it is
    dtype: torch.dtype,
    backward_dtype: torch.dtype,
    known: Sequence[Tensor] | None = None,  # scale and reciprocal, both (); None of scales of blocks, or a first step
) -> Tensor:
    """The whole weight, a `GatheredWeight`; its gradient goes to the shards."""
    quantizer = spec.slots.weight
    pair = known or (None, None)
    if known is None and spec.scales.is_shared:

        def largest_amax() -> Tensor:
            return largest(tensor_amax(_rounded(shard, dtype)), ranks_of(shard)).view(1, 1).to(dtype)

        found = spec.scales.pair(ScaledOperand("weight", (), quantizer, shared=largest_amax))
        pair = (found.scale, found.scale_inv) if found else pair
    return _Gather(quantizer, dtype, backward_dtype)(shard, *pair)  # type: ignore[no-any-return]


def trace_shard_scales(
    shards: Sequence[Tensor],  # DTensors of one mesh, as above
    quantizer: Quantizer,
    dtype: torch.dtype,
) -> list[Tensor]:  # scale and reciprocal of each
    """One reduction for all of them."""
    amaxes = largest(torch.stack([tensor_amax(_rounded(shard, dtype)) for shard in shards]), ranks_of(shards[0]))
    return [one for amax in amaxes.to(dtype).unbind() for one in current_scale([amax.view(1, 1)], quantizer)]


def ranks_of(shard: Any) -> Ranks:
    """The ranks of the dimension of its mesh along which it is sharded."""
    dim = next(place for place, placement in enumerate(shard.placements) if placement.is_shard())
    return Ranks(shard.device_mesh.get_group(dim).group_name, shard.device_mesh.size(dim))


def record_rounded_amax(shard: Tensor, dtype: torch.dtype, amax: Written) -> None:
    """Delayed scaling's record of what `gather_weight` casts, as far as it is this rank's."""
    record_amax([_rounded(shard, dtype)], amax)


def _rounded(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's rows, without autograd, rounded to a dtype."""
    return compat.shard_of(shard).detach().to(dtype)


gather_weight = op_of(trace_gather_weight, name="gather_weight")
shard_scales = op_of(trace_shard_scales, name="shard_scales")
record_weight_amax = op_of(record_rounded_amax, name="record_weight_amax")
