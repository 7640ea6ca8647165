"""Sites whose weight gradient does not go to autograd: their backward adds it to the parameter's `main_grad` (Note
[Gradients that are added in the backward]) or leaves its GEMM for later (Note [Weight gradients that wait]). Which can;
and which give it to autograd in another dtype than the weight's, as the parameter's `grad_dtype` says."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from te_inductor import compat, targets
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.ops.layers.parts import GradientSink
from te_inductor.ops.layers.sinks import Deferred, MainGrad
from te_inductor.ops.layers.unrounded import Unrounded
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import holder_path, inner_path, module_path
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.owners import from_parameter, keeps_values, owner_of
from te_inductor.passes.graph.values import requires_grad, value
from te_inductor.passes.pre_grad.plan import Candidate, LoweredPlan, Plan
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.report import Unmet
from te_inductor.recipes import Slots
from te_inductor.runtime.gradients.main_grads import checked

SINKS: dict[str, GradientSink] = {"main_grad": MainGrad(), "deferred": Deferred()}  # by options["wgrad"]


def wanted(match: Match) -> bool:
    """Whether the site has a weight gradient at all."""
    return value(match.node).requires_grad and value(match.weight).requires_grad


def refusal(match: Match, slots: Slots, bodies: Bodies, examples: Sequence[object], options: Options) -> Refusal | None:
    """Why a site's weight gradient goes to autograd all the same, or is rounded to the weight's dtype for it; `examples`
    are the inputs that the graph is compiled for.

    Raises:
        MainGradError: there is a main_grad that does not fit its parameter.
    """
    if options.wgrad == "grad":
        dtype = grad_dtype(match, bodies, examples)
        why = None if dtype is None else _not_taken(match, bodies, options)
        return None if why is None else Refusal("%s, so that autograd rounds it before it is %s", why, dtype)
    if (why := _not_taken(match, bodies, options)) is not None:
        return why
    if compat.inside_ddp():
        return Refusal("DistributedDataParallel reduces what autograd has of it, in the backward")
    parameter = bodies.held(bodies.outer(match.weight), examples)
    if options.wgrad == "deferred":
        return _not_deferred(slots, parameter, value(match.weight).device, options)
    if not isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
        return Refusal("the parameter has no main_grad")
    checked(parameter)  # type: ignore[arg-type]
    return None


def _not_taken(match: Match, bodies: Bodies, options: Options) -> Refusal | None:
    """Why no sink but autograd in the weight's own dtype can have the gradient."""
    if (of_part := match.first_refusal(lambda part: part.refuse_taken(match, options.wgrad == "deferred"))) is not None:
        return of_part
    if not bodies.reaches(match.node.graph):
        return Refusal("inside a control-flow body, which option 'wgrad' does not reach")
    if not _is_whole(bodies.outer(match.weight), match):
        return Refusal("the weight is computed in the graph, or one of several in a parameter")
    return Refusal("the parameter holds the transpose of what the GEMM computes") if match.transposed else None


def grad_dtype(match: Match, bodies: Bodies, examples: Sequence[object]) -> torch.dtype | None:
    """What autograd casts the gradient of a site's parameter to, where that is another dtype than the parameter's, which
    is narrower than the GEMM's sums."""
    owner = owner_of(match.weight, bodies)
    parameter = None if owner is None else bodies.held(owner.parameter, examples)
    if not isinstance(parameter, torch.nn.Parameter) or parameter.dtype == torch.float32 or not parameter.is_leaf:
        return None
    return None if parameter.grad_dtype == parameter.dtype else parameter.grad_dtype


def sink_of(sites: Sequence[Candidate], bodies: Bodies, plan: Plan) -> GradientSink | None:
    """What takes the weight gradients of sites that are one GEMM, behind `check_extras`; None: autograd."""
    sink = SINKS.get(plan.options.wgrad)
    if sink is not None and all(map(takes, sites)):
        return sink
    if isinstance(plan, LoweredPlan):
        return None
    wide = any(grad_dtype(site.match, bodies, plan.inputs) for site in sites)
    refused = (not wanted(site.match) or _not_taken(site.match, bodies, plan.options) for site in sites)
    return Unrounded() if wide and not any(refused) else None


def _is_whole(weight: fx.Node, match: Match) -> bool:
    """Whether the weight is a parameter and nothing else, of one layer or of experts."""
    held = weight.op == "placeholder" and isinstance(value(weight), torch.nn.Parameter)
    return held and value(weight).dim() == match.dims


def takes(site: Candidate) -> bool:
    """Whether the site's weight gradient does not go to autograd, behind `check_extras`."""
    return site.low and wanted(site.match) and "wgrad" not in site.unmet


def other_readers(sites: Iterable[Candidate], bodies: Bodies) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The parameters whose gradients some sites do not leave to autograd, each with a node that reads it besides, whose
    part of its gradient autograd has: an embedding that is tied to the output layer, a penalty, another site."""
    taken = {site.match.node: site.match for site in sites if takes(site)}
    readers = bodies.readers() if taken else {}
    for parameter in dict.fromkeys(bodies.outer(match.weight) for match in taken.values()):
        same = [parameter]  # and views and casts of it
        for source in same:
            for reader in readers.get(source, ()):
                if not requires_grad(reader):
                    continue
                if reader in taken and bodies.outer(taken[reader].x) is not source:
                    continue
                if keeps_values(reader):
                    same.append(reader)
                else:
                    yield parameter, reader


def left_to_autograd(plan: Plan, bodies: Bodies) -> Iterator[Unmet]:
    """What computes with weights and leaves their gradients to autograd, besides the sites that are refused."""
    reason = "the layer stays in high precision, so that its weight gradient goes to autograd"
    high = [site for site in plan.candidates if not site.low and not site.stored]
    yield from (Unmet("wgrad", site.fqn, reason) for site in high if wanted(site.match))
    products = [product for product in plan.products.unlowered if not product.outside]
    for product in products:
        weights = (one for one in product.product.operands if from_parameter(one, bodies))
        learns = requires_grad(product.product.node) and any(map(requires_grad, weights))
        if learns or product.gemm == "wgrad":
            yield Unmet("wgrad", product.fqn, reason)
    named = {site.match.node for site in plan.candidates if not takes(site)}
    named |= {product.product.node for product in products}
    for parameter, reader in other_readers(plan.candidates, bodies):
        if reader not in named:
            module = module_path(reader)
            fqn = ".".join(filter(None, (module, inner_path(module, holder_path(parameter)))))
            why = f"{name(reader)} reads the parameter too, and autograd has that part of its gradient"
            yield Unmet("wgrad", fqn, why)


def guard(matches: Iterable[Match], bodies: Bodies, examples: Sequence[object], options: Options) -> None:
    """Have Dynamo compile anew where a parameter has a main_grad that had none, or the other way round, or gradients of
    another dtype: other modules of the class run the same graph, and either may be set after a first call."""
    whole = (
        bodies.outer(match.weight)
        for match in matches
        if wanted(match) and _is_whole(bodies.outer(match.weight), match)
    )
    for node in dict.fromkeys(whole):
        if (parameter := bodies.held(node, examples)) is not None:
            if options.wgrad == "main_grad":
                compat.guard_on_attribute(node, parameter, "main_grad")
            if isinstance(parameter, torch.Tensor) and parameter.dtype != torch.float32 and parameter.is_leaf:
                compat.guard_on_attribute(node, parameter, "grad_dtype", by_type=False)


def _not_deferred(slots: Slots, parameter: object, device: torch.device, options: Options) -> Refusal | None:
    if targets.of(device).is_gpu and options.in_cuda_graphs():
        return Refusal("its operands would be in a CUDA graph's memory, which the next replay overwrites")
    if slots.wgrad.microscaled and targets.of(device).multiplies(slots.wgrad):
        return Refusal(
            "this device's tensor cores for scales of %s are reached by generated code alone", slots.input.scope
        )
    if isinstance(parameter, torch.Tensor) and compat.is_gathered(parameter):
        return Refusal("FSDP reduces the parameter's gradient at the end of the backward")
    return None
