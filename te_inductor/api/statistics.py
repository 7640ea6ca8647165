"""`te_inductor.statistics(compiled)`: what delayed scaling knows of each tensor that it casts, and, of a sample, what is
lost.

# Note [Statistics]
Nothing is added to a step. Delayed scaling keeps an amax, a scale and a history for each tensor on the device, and the
end of its step counts what did not suit them (Note [Scales that do not suit]): that is read when statistics are asked
for, which waits for the device once. Relative errors, and shares of values, are of no step that was run: they need the
tensors themselves, which fused kernels never store. A sample is a batch on which the model runs once more, uncompiled
and in high precision, as for `accuracy_report`; delayed scaling casts it by the scales that the next step would have."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import compat
from te_inductor.api.accuracy import accuracy_of
from te_inductor.api.accuracy_figures import AccuracyReport, OperandAccuracy
from te_inductor.api.saved_state import order_of, parameters_of, places_of
from te_inductor.backend import parse, te
from te_inductor.presentation.paths import grouped, plain, without_wrappers
from te_inductor.presentation.statistics import SampleLoss, SlotStatistics, Statistics, StepCounts, headroom
from te_inductor.recipes import DelayedScaling, Recipe
from te_inductor.runtime.state import store
from te_inductor.runtime.state.misfits import Misfits, counts_of
from te_inductor.runtime.state.state_sites import StateSite, name_of, same_site
from te_inductor.runtime.state.store import Key, QuantizerState


def statistics(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> Statistics:
    """The statistics of every tensor that a compiled model casts under delayed scaling: amax, scale, headroom, and in how
    many steps values were cut off, lost digits, or were inf or NaN. They cost a step nothing; the call waits for the
    device.

    With `inputs` and `kwargs`, a batch, they are also of a sample: relative error and the shares of values that saturate
    and that become 0, of tensors of every recipe. A sample costs a forward and a backward of the model, uncompiled and in
    high precision, and casts beside them; `options` are those of the compile where `model` is not what `torch.compile`
    returned, `loss` is as for `accuracy_report`. It changes no scale, no gradient and no random state.

    Raises:
        StateError: `model` is no module.
        OptionError, RecipeError: the options are wrong; `loss` returns no scalar.
    """
    with store.LOCK:
        slots = list(_of_state(model))  # type: ignore[arg-type]
    if not inputs and not kwargs:
        return Statistics(slots)
    given = compat.options_of_compiled(model, te) if options is None else options
    report = accuracy_of(model, inputs, kwargs, parse(None, given), loss, _live_scale)
    return Statistics(_with_sample(slots, report))


def _of_state(model: nn.Module) -> Iterator[SlotStatistics]:
    """Reads the state of all quantizers of a model with one copy from each device."""
    found: list[tuple[str, Key, QuantizerState, str | None]] = []
    for parameter, names in parameters_of(model):
        quantizers = store.quantizers_of(parameter)
        by_site = {key.site: key for key in quantizers}  # of several recipes, that of the last compile
        places = sorted(places_of(by_site, names).items(), key=lambda one: order_of(one[0]))
        moved = store.recipe_behind(parameter) if store.is_moved(parameter) else None
        found += [(name_of(place, names).rpartition(".")[0], key, quantizers[key], moved) for place, key in places]
    states = [state for _, _, state, _ in found]
    counts, values = counts_of(set(states)), _values(states)
    for fqn, key, state, moved in found:
        yield replace(_slot(fqn, key, values[state], counts.get(state)), moved=moved)


@torch.no_grad()
def _values(states: list[QuantizerState]) -> dict[QuantizerState, tuple[float, float]]:
    """The newest amax that each history holds, and the scale."""
    found: dict[QuantizerState, tuple[float, float]] = {}
    for group in grouped(dict.fromkeys(states), lambda state: state.scale.device).values():
        rows = torch.stack([torch.stack([one.history[-1], one.scale]) for one in group]).tolist()
        found |= {state: (amax, scale) for state, (amax, scale) in zip(group, rows, strict=True)}
    return found


def _slot(fqn: str, key: Key, values: tuple[float, float], counts: Misfits | None) -> SlotStatistics:
    (amax, scale), slot = values, key.site.slot
    element = getattr(key.recipe.slots(), slot).format
    made = SlotStatistics(fqn, slot, key.recipe.name, element.name, scale=scale)
    if amax > 0:
        made = replace(made, amax=amax, headroom=headroom(element.max, amax, scale))
    if counts is None:
        return made
    names = [one.name for one in fields(StepCounts) if one.name != "excess"]  # all but what only the guard asks
    excess = counts.highest / element.max
    return replace(made, counts=StepCounts(**{name: getattr(counts, name) for name in names}, excess=excess))


def _live_scale(parameter: Tensor, site: StateSite, recipe: Recipe) -> Tensor | None:
    """The scale of a tensor that the next step would cast with; None where it would take the tensor's own amax."""
    if not isinstance(recipe, DelayedScaling):
        return None
    states = {key.site: state for key, state in store.quantizers_of(parameter).items() if key.recipe == recipe}
    held = same_site(states, site)
    return None if not held or states[held[0]].lacks_history else states[held[0]].scale


def _with_sample(slots: list[SlotStatistics], report: AccuracyReport) -> list[SlotStatistics]:
    """Adds what a sample loses to what is known, and the tensors of recipes without state."""
    found = {(plain(one.fqn), one.slot): one for one in slots}
    for gemm in report.gemms:
        for operand in (gemm.a, gemm.b):
            key = plain(without_wrappers(gemm.fqn)), operand.tensor
            element = operand.format.partition(" ")[0]
            known = found.get(key) or SlotStatistics(gemm.fqn, operand.tensor, gemm.recipe, element)
            found[key] = _sampled(known, operand)
    return list(found.values())


def _sampled(known: SlotStatistics, operand: OperandAccuracy) -> SlotStatistics:
    """Adds a cast of a sample; the worst counts where a tensor is cast several times, as by blocks."""
    error = 0.0 if operand.sqnr_db is None else 10 ** (-operand.sqnr_db / 20)
    loss, other = SampleLoss(error, operand.saturated, operand.underflowed), known.sample
    if other is not None:
        loss = SampleLoss(*(max(pair) for pair in zip(astuple(loss), astuple(other), strict=True)))
    return replace(known, amax=operand.amax if known.amax is None else known.amax, sample=loss)
