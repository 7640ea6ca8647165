"""Delayed scaling in a graph: scales are read at the step's begin, amaxes recorded beside the casts, scales updated at
its end, those of gradients at the end of the backward."""

from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import delayed

read_scales = op_of(delayed.read_scales, lambda states: states[0].new_empty((2 * len(states), delayed.APART)))
scale_at = op_of(delayed.scale_at, lambda read, place: read.new_empty(()))
record_amax = op_of(delayed.record_amax, lambda pieces, amax: None)
update_scales = op_of(delayed.update_scales, lambda *_, **__: None)


class _DelayedStep(torch.autograd.Function):
    """Its backward runs after that of every site that takes its output: there the gradients' scales are updated, once a
    backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, update: tuple[Any, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.update = update
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:  # type: ignore[override]
        update_scales(*ctx.update)
        return None, None


def _delayed_step(
    leaf: Tensor,
    states: list[Tensor],
    update: ScaleUpdate,
    misfits: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """A token for the sites whose gradients' state this is; `leaf` is any input of the graph that requires a gradient,
    and gets none from here. The others are those of `update_scales`."""
    leaf = compat.local_of(leaf)
    update_of_backward = (states, update, None, misfits, own)
    return _DelayedStep.apply(leaf, update_of_backward)  # type: ignore[no-any-return]


delayed_step = op_of(_delayed_step, name="delayed_step")
