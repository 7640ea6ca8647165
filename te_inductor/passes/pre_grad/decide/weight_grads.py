"""Sites whose weight gradient does not go to autograd: their backward adds it to the parameter's `main_grad` (Note
[Gradients that are added in the backward]) or leaves its GEMM for later (Note [Weight gradients that wait]). Which can,
and the inputs that bring what takes them into the graph."""

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from te_inductor import compat, targets
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import place_of
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.match.rule import Match
from te_inductor.recipes import Slots
from te_inductor.runtime.deferred_wgrads import TICKETS
from te_inductor.runtime.main_grads import MAIN_GRADS, checked

TAKERS = {"main_grad": MAIN_GRADS, "deferred": TICKETS}  # by options["wgrad"]


def wanted(match: Match) -> bool:
    """Whether the site has a weight gradient at all."""
    return value(match.node).requires_grad and value(match.weight).requires_grad


def refusal(match: Match, slots: Slots, bodies: Bodies, examples: Sequence[object], options: Options) -> Refusal | None:
    """Why a site's weight gradient goes to autograd all the same; `examples` are the inputs that the graph is compiled
    for.

    Raises:
        MainGradError: there is a main_grad that does not fit its parameter.
    """
    if match.parallel is not None:
        return Refusal("the weight is sharded over ranks, and autograd says how its gradient is")
    if not bodies.reaches(match.node.graph):
        return Refusal("inside a control-flow body, which option 'wgrad' does not reach")
    node = bodies.outer(match.weight)
    if not _is_whole(node, match):
        return Refusal("the weight is computed in the graph, or one of several in a parameter")
    if match.transposed:
        return Refusal("the parameter holds the transpose of what the GEMM computes")
    if compat.inside_ddp():
        return Refusal("DistributedDataParallel reduces what autograd has of it, in the backward")
    parameter = examples[place_of(node)] if examples else None
    if options.wgrad == "deferred":
        return _not_deferred(slots, parameter, value(match.weight).device, options)
    if not isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
        return Refusal("the parameter has no main_grad")
    checked(parameter)  # type: ignore[arg-type]
    return None


def _is_whole(weight: fx.Node, match: Match) -> bool:
    """Whether the weight is a parameter and nothing else, of one layer or of experts."""
    dims = 3 if match.groups else 2
    return weight.op == "placeholder" and isinstance(value(weight), torch.nn.Parameter) and value(weight).dim() == dims


def guard_on_totals(matches: Iterable[Match], bodies: Bodies, examples: Sequence[object]) -> None:
    """Have Dynamo compile anew where a parameter has a main_grad that had none, or the other way round: other modules
    of the class run the same graph, and whoever makes totals may do so after a first call."""
    whole = (
        bodies.outer(match.weight)
        for match in matches
        if wanted(match) and _is_whole(bodies.outer(match.weight), match)
    )
    for node in dict.fromkeys(whole):
        compat.guard_on_attribute(node, examples[place_of(node)], "main_grad")


def _not_deferred(slots: Slots, parameter: object, device: torch.device, options: Options) -> Refusal | None:
    if device.type == "cuda" and _in_cuda_graphs(options):
        return Refusal("its operands would be in a CUDA graph's memory, which the next replay overwrites")
    if slots.wgrad.microscaled and targets.of(device).multiplies(slots.wgrad):
        return Refusal(
            "this device's tensor cores for scales of %s are reached by generated code alone", slots.input.scope
        )
    if isinstance(parameter, torch.Tensor) and compat.is_gathered(parameter):
        return Refusal("FSDP reduces the parameter's gradient at the end of the backward")
    return None


def _in_cuda_graphs(options: Options) -> bool:
    from torch._inductor import config

    patches = torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None).config
    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))
