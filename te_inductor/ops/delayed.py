"""Delayed scaling in a graph: scales are read at the step's begin, amaxes recorded beside the casts, scales updated at
its end, those of gradients at the end of the backward."""

from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.compat import constant_type_name
from te_inductor.ops.definition import define
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.eager import delayed

_UPDATE = constant_type_name(ScaleUpdate)


def _read_scales_fake(
    scales: list[Tensor],  # n of ()
) -> list[Tensor]:  # n scales, n reciprocals
    return [scale.new_empty(()) for scale in (*scales, *scales)]


read_scales = define("read_scales(Tensor[] scales) -> Tensor[]", delayed.read_scales, _read_scales_fake)
record_amax = define(
    "record_amax(Tensor[] pieces, Tensor(a!) amax) -> ()", delayed.record_amax, lambda pieces, amax: None
)
update_scales = define(
    f"update_scales(Tensor(a!)[] amaxes, Tensor(b!)[] scales, Tensor(c!)[] histories, {_UPDATE} update, Tensor[]?"
    " read=None, Tensor(d!)? misfits=None, bool own=False) -> ()",
    delayed.update_scales,
    lambda amaxes, scales, histories, update, read=None, misfits=None, own=False: None,
)


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
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    update: ScaleUpdate,
    misfits: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """A token for the sites whose gradients' state this is; `leaf` is any input of the graph that requires a gradient,
    and gets none from here. The others are those of `update_scales`."""
    leaf = compat.local_of(leaf)
    update_of_backward = (amaxes, scales, histories, update, None, misfits, own)
    return _DelayedStep.apply(leaf, update_of_backward)  # type: ignore[no-any-return]


delayed_step = define(
    f"delayed_step(Tensor leaf, Tensor[] amaxes, Tensor[] scales, Tensor[] histories, {_UPDATE} update, Tensor?"
    " misfits=None, bool own=False) -> Tensor",
    _delayed_step,
)
