"""`calibrate(model, batches)`: a recipe for each GEMM of each layer, chosen by what it loses and what it takes.

The errors are measured on the model's own tensors (`errors.py`), the times are those that the size rule counts
(`times.py`), and the choice is exact (`knapsack.py`): of all policies whose step takes at most `budget` times as long as
the fastest one's, the one that loses least, summed up over all GEMMs."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from te_inductor import targets
from te_inductor.api.calibration.errors import Batch, errors_of, sensitivities_of
from te_inductor.api.calibration.knapsack import choose
from te_inductor.api.calibration.policy import CalibratedLayer, Calibration
from te_inductor.api.calibration.times import GraphTimes, merged, times_of
from te_inductor.api.calibration.units import Unit, allowed, cast_alone, policy_of, rank_correlation
from te_inductor.api.tracing import module_of, traced
from te_inductor.backend import parse, run_passes
from te_inductor.config import Options
from te_inductor.errors import OptionError, wrong_type
from te_inductor.passes.pre_grad import FIND
from te_inductor.passes.pre_grad.plan import Plan

__all__ = ["Calibration", "calibrate"]


def calibrate(
    model: Callable[..., Any],
    batches: Iterable[Any],
    budget: float = 1.03,
    *,
    step: Any = None,
    target: str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    check: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Calibration:
    """Chooses a recipe for fprop, dgrad and wgrad of each linear layer: ``options={"policy": calibrate(model, batches)}``.

    Of `batches` each is the arguments of one call, a tuple, a dict of keywords, or a single argument; a few are enough.
    The model runs on them uncompiled and in high precision, as in `accuracy_report`, with gradients of `loss(output)`;
    parameters and the random state are left as they were, buffers that the forward updates are updated. Under
    ``"delayed"`` tensors are cast by the amaxes of the batches before.

    `budget` is how long a step may take, as a multiple of what the fastest choice takes: 1.0 is the fastest policy, more
    leaves time for what loses less. Times are the size rule's estimates on the model's own device or on `target`, of the
    first batch, or of `step`, the arguments of another call: a step of training on the target, where `batches` are
    smaller. Where they are on the meta device nothing of that size runs. Layers that the size rule leaves stay in high
    precision.

    With `check` the loss is computed once more for each layer, with that layer's forward alone in low precision, and the
    result has the rank correlation of that and what the forward loses.

    `options` are those of the compile but for the recipe and the backward. Layers that their policy names are left to
    it: ``options={"policy": {**mine, **calibration}}``. Several ranks need one policy: calibrate on one of them.

    Raises:
        OptionError, RecipeError: the options are wrong, or an argument is; no GEMM was timed on the device; the model
            holds no numbers.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    parsed, there, given = _read(model, batches, budget, target, loss, options)
    graphs = timed(model, given[0] if step is None else _batch(step), parsed, there)
    return calibrated(model, given, graphs, budget, _device_name(model, there), loss, parsed, check=check)


def calibrated(
    model: Callable[..., Any],
    batches: Sequence[Batch],
    graphs: Sequence[GraphTimes],
    budget: float,
    device: str,
    loss: Callable[[Any], Tensor] | None,
    options: Options,
    *,
    check: bool = False,
) -> Calibration:
    """What `calibrate` returns, by times that are known."""
    units = [Unit(groups) for groups in merged(graphs)]
    names = {fqn: unit.names for unit in units for fqn in unit.layers if unit.names}
    lost = errors_of(model, batches, names, loss, options)
    units = [unit for unit in units if set(unit.layers) <= set(lost.shares) or not unit.names]
    places = choose([unit.options(lost) for unit in units], allowed(units, graphs, budget))
    assert places is not None  # the fastest choice is within every budget
    picked = [list(unit.gains)[place] for unit, place in zip(units, places, strict=True)]
    moved = sensitivities_of(model, batches, cast_alone(units), loss, options) if check else {}
    high = sum(graph.device_s for graph in graphs)
    return Calibration(
        policy_of(units, picked),
        tuple(
            CalibratedLayer(
                *(fqn, unit.layers[fqn], tuple(unit.layers), lost.shares.get(fqn, {})),
                *(unit.times(choice), unit.why(choice, lost), moved.get(fqn), lost.weights.get(fqn, 1.0)),
            )
            for unit, choice in zip(units, picked, strict=True)
            for fqn in unit.layers
        ),
        device,
        " and ".join(dict.fromkeys(graph.rates for graph in graphs)),
        float(budget),
        high - sum(unit.gains[choice] for unit, choice in zip(units, picked, strict=True)),
        high - sum(max(unit.gains.values()) for unit in units),
        high,
        len(batches),
        rank_correlation(units, lost, moved) if check else None,
    )


def _read(
    model: Callable[..., Any], batches: Iterable[Any], budget: Any, target: Any, loss: Any, options: Any
) -> tuple[Options, targets.Target | None, list[Batch]]:
    """Checks what `calibrate` was given."""
    for name in ("recipe", "backward"):
        if options is not None and isinstance(options, Mapping) and options.get(name) is not None:
            raise OptionError(
                f"calibrate was given option {name!r}, expected none, as it chooses that itself; layers that are to have"
                " a recipe of their own are named in the option 'policy'"
            )
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 1:
        raise OptionError(f"budget is {budget!r}, expected a multiple of the fastest choice's time, such as 1.03")
    if loss is not None and not callable(loss):
        raise OptionError(wrong_type("loss", loss, "a function of the model's output"))
    if target is not None and not isinstance(target, str):
        raise OptionError(wrong_type("target", target, "the name of a device"))
    given = [_batch(batch) for batch in batches]
    if not given:
        raise OptionError("batches is empty, expected the arguments of at least one call")
    if any(one.is_meta for one in module_of(model).parameters()):
        raise OptionError(
            "the model is on the meta device, which holds no numbers to measure errors of; expected its weights. Inputs"
            " of `step` may be there"
        )
    return parse(None, options), None if target is None else targets.by_name(target), given


def _batch(given: Any) -> Batch:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def timed(model: Callable[..., Any], step: Batch, options: Options, there: targets.Target | None) -> list[GraphTimes]:
    """The times of the graphs of one call, on a device that need not be here."""
    found: list[GraphTimes | None] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, options, example_inputs)
        with targets.taken_for(there):
            if run_passes(plan, FIND).failure is None:
                found.append(times_of(plan))
        return gm.forward

    args, kwargs = step
    if any(isinstance(one, Tensor) and one.is_meta for one in (*args, *kwargs.values())):
        model = _on_meta(model)
    # No size of this call is to make sizes of later ones symbols.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), traced(model, backend, options.fallback) as run:
        run(*args, **kwargs)
    graphs = [graph for graph in found if graph is not None]
    if found and not graphs:
        device = next((one.device for one in module_of(model).parameters()), torch.device("cpu"))
        name = targets.of(device).name if there is None else there.product
        raise OptionError(
            f"no layer could be timed on {name}, expected a device whose GEMMs were timed, and layers of at least 16"
            " columns there; another device is named by target, such as 'h100'"
        )
    return graphs


def _on_meta(model: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the model whose parameters and buffers have no memory.

    Raises:
        OptionError: it is no module.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("the model of a step on the meta device", model, "an nn.Module"))
    memo: dict[int, Any] = {}
    for one in model.parameters():
        memo[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
    memo |= {id(one): torch.empty_like(one, device="meta") for one in model.buffers()}
    return copy.deepcopy(model, memo)


def _device_name(model: Callable[..., Any], there: targets.Target | None) -> str:
    if there is not None:
        return there.product
    device = next((one.device for one in module_of(model).parameters()), torch.device("cpu"))
    return targets.of(device).product or targets.of(device).name
