"""Delayed scaling on real tensors: the scale of a tensor follows from the amaxes of earlier steps.

State of one quantizer is one fp32 tensor (`runtime/state/store.py` keeps it), of which a graph has few: first `history`
(H,), the amaxes of the last H - 1 steps, newest last, behind slot 0, the largest magnitude recorded since the last update,
which is zero between steps; then `scale` (), the factor before the cast. A kernel reaches slot 0 by the tensor's address.

Source: TransformerEngine, pytorch/quantization.py, common/recipe/delayed_scaling.cu; docs/numerics.md states it.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from te_inductor.distributed import agreement
from te_inductor.distributed.amax_groups import left_alone, process_group
from te_inductor.errors import RecipeError, StateError, wrong_type
from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.runtime.eager import Written

FP32_TINY = torch.finfo(torch.float32).tiny  # a smaller scale has no finite reciprocal
FP32_MAX = torch.finfo(torch.float32).max
JUMP = 16.0  # by a larger factor one update seldom moves a scale
APART = 4  # numbers from one scale to the next: kernels are compiled for addresses that are multiples of 16 bytes
PATIENCE = 2  # steps in a row that an outlier is kept out of the history
FAILURE = 16  # steps with a scale that suits, by which one with a scale that does not is forgotten
FAILING = 16 * FAILURE  # the level at which scales keep failing to suit: Note [Scales that do harm] in misfits.py


def read_scales(
    states: list[Tensor],  # n of (H + 1,)
) -> Tensor:  # (2 * n, APART), of which all but the first column is zeros
    """Copies of all scales, then of their reciprocals: what one step computes with, whatever happens to the state."""
    scales = torch.stack([state[-1] for state in states])
    found = scales.new_zeros(2 * len(states), APART)
    found[:, 0] = torch.cat([scales, scales.reciprocal()])
    return found


def scale_at(
    read: Tensor,  # what `read_scales` returned
    place: int,
) -> Tensor:  # ()
    """The number of a place, as a tensor of its own: Note [Numbers of one tensor]."""
    return read[place, 0].clone()


def record_amax(
    pieces: list[Tensor],
    amax: Written,  # (), or state, which begins with it
) -> None:
    """Raise `amax` to the largest magnitude of all pieces; NaN if one of them has one."""
    first = _without_version(amax).view(-1)[0]
    for x in pieces:
        if x.numel():
            first.copy_(torch.maximum(first, x.detach().abs().amax().float()))


def update_scales(
    states: list[Written],  # n of (H + 1,)
    update: ScaleUpdate,
    read: Tensor | None = None,  # what `read_scales` returned, which has to run before
    misfits: Written | None = None,  # (n, COUNTS) int32, of which runtime/state/misfits.py tells
    own: bool = False,  # whether this step cast by own amaxes
) -> None:
    """End of a step: each quantizer's recorded amax enters its history, and its scale follows. `misfits` counts whether
    the old scale suited the amax, and what else `Misfits` has.

    A recorded amax of 0, inf or NaN is no observation: it enters no history, so it freezes no scale. Where the window
    holds no observation the scale stays.
    """
    if update.waits:
        return
    before = torch.stack(states)
    old, history = before[:, -1], before[:, :-1]
    amax, recipe = history[:, 0], update.recipe
    nonfinite = ~(amax < torch.inf)
    amax = torch.where((amax > 0) & (amax < torch.inf), amax, 0.0)  # first, so that no rank's NaN hides another's amax
    if reduces(update):
        reduce(amax, update)
    entering = amax
    if update.heals and misfits is not None:
        outlies = (old != 1) & (amax * old > update.outlying) & (misfits[:, -1] < PATIENCE)
        entering = torch.where(outlies, 0.0, amax)
    seen = entering > 0
    history[:, 0] = entering
    scale = scale_of(_chosen_amax(history, recipe.amax_compute_algo), old, update)
    if misfits is not None:
        jumps = (old != 1) & ((scale > JUMP * old) | (scale * JUMP < old))  # 1: it had none
        others = nonfinite, jumps, torch.full_like(jumps, own), entering != amax
        cast, following = (torch.where(amax > 0, (amax * one).clamp(min=FP32_TINY), 0.0) for one in (old, scale))
        _count_misfits(misfits, torch.zeros_like(cast) if own else cast, following, others, update)
    rolled = torch.cat([torch.zeros_like(history[:, :1]), history[:, 2:], history[:, :1]], 1)[:, : history.shape[1]]
    rest = torch.cat([torch.zeros_like(history[:, :1]), history[:, 1:]], 1)
    after = torch.cat([torch.where(seen.unsqueeze(1), rolled, rest), scale.unsqueeze(1)], 1)
    torch._foreach_copy_(list(map(_without_version, states)), list(after.unbind()))


def _count_misfits(
    misfits: Tensor, cast: Tensor, following: Tensor, others: Sequence[Tensor], update: ScaleUpdate
) -> None:
    """Counts by what the scale brought the amax to (`cast`), and what the next one would have brought it to; 0 fits."""
    steps, cuts, losses, first, *counted, failing, since, peak, in_a_row = misfits.unbind(1)
    steps, (least, most) = steps + 1, update.suitable
    cut, coarse, outlies = cast > most, (cast > 0) & (cast < least), cast > update.outlying
    unsuited = (following > most) | ((following > 0) & (following < least))
    if update.heals:
        level = torch.where(unsuited, FAILURE, -1)
    else:
        level = torch.where(cut | coarse, FAILURE, -1)
        level = torch.where(cast > 2 * most, 4 * FAILURE, level)
        level = torch.where(outlies, FAILING, level)
    since = torch.where((failing == 0) & (level > 0), steps, since)
    failing = (failing + level).clamp(min=0)
    first = torch.where((first == 0) & outlies, steps, first)
    first = torch.where((first == 0) & (failing >= FAILING), since, first)
    counted = [count + new for count, new in zip(counted, others, strict=True)]
    peak = torch.maximum(peak, cast.view(torch.int32))  # bits of positive numbers, which are in the numbers' order
    in_a_row = torch.where(unsuited, in_a_row + 1, 0)
    columns = [steps, cuts + cut, losses + coarse, first, *counted, failing, since, peak, in_a_row]
    _without_version(misfits).copy_(torch.stack(columns, 1))


def reduces(update: ScaleUpdate) -> bool:
    """Whether all ranks take the largest of their amaxes."""
    return bool(update.groups) and (update.agreement is None or agreement.reached(update.agreement))


def reduce(amax: Tensor, update: ScaleUpdate) -> None:
    """Takes the largest amaxes of all ranks.

    Raises:
        StateError: the others did not come before the process group's timeout, where the host waits for it.
    """
    for name in update.groups:
        group = process_group(name)
        try:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise StateError(left_alone(name, error)) from error


def scale_of(
    amax: Tensor,  # (tensors,)
    old: Tensor,  # (tensors,) scales before, which stay where there is nothing to go by
    update: ScaleUpdate,
) -> Tensor:  # (tensors,)
    recipe = update.recipe
    if recipe.scaling_factor_compute_algo is None:
        scale = torch.full_like(amax, update.largest) / amax
    else:
        scale = recipe.scaling_factor_compute_algo(amax, old, update.format.max, recipe)
    usable = (amax > 0) & (amax < torch.inf) & ~scale.isnan()
    return torch.where(usable, scale.clamp(FP32_TINY, FP32_MAX), old)


def _without_version(state: Tensor) -> Tensor:
    """The same memory, so that autograd does not see it change: the backwards of two microbatches each hold the
    gradients' state, and the first one's update must not invalidate the second."""
    return state.data


def _chosen_amax(history: Tensor, algorithm: str | Callable[[Tensor], Tensor]) -> Tensor:  # history (tensors, H)
    if callable(algorithm):
        return algorithm(history.t())
    return history.amax(1) if algorithm == "max" else history[:, 0]


@functools.lru_cache
@torch.no_grad()
def check_functions(recipe: DelayedScaling, device: torch.device) -> None:
    """Call the user's functions once: one number for all tensors would be broadcast, and give them all one scale.

    Raises:
        RecipeError: one raised, or returned something else than a number for each tensor.
    """
    tensors = 2 if recipe.amax_history_len != 2 else 3  # so that no other dimension is as long
    for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
        function = getattr(recipe, name)
        if not callable(function):
            continue
        history = torch.ones(recipe.amax_history_len, tensors, dtype=torch.float32, device=device)
        amax = history[0]
        args = (
            (history,) if name == "amax_compute_algo" else (amax, amax.clone(), recipe.fp8_format.forward.max, recipe)
        )
        what = f"DelayedScaling.{name} ({function.__qualname__})"
        try:
            found = function(*args)
        except Exception as error:
            raise RecipeError(f"{what} raised {type(error).__name__} for {tensors} tensors: {error}") from error
        if not isinstance(found, Tensor):
            raise RecipeError(wrong_type(f"what {what} returned", found, "a tensor with a number for each tensor"))
        if found.shape != (tensors,) or not found.is_floating_point() or found.device != amax.device:
            raise RecipeError(
                f"{what} returned shape {tuple(found.shape)}, {found.dtype}, on {found.device} for {tensors} tensors,"
                f" expected floating point of shape ({tensors},) on {amax.device}; histories are (amax_history_len,"
                " tensors)"
            )
