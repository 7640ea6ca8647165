"""The pass that writes down what was decided, as `explain` and the warning of a compile tell it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from te_inductor import targets
from te_inductor.kernels.cutlass_tiles import Kernel
from te_inductor.kernels.plain import EMULATED
from te_inductor.passes.graph.bodies import Bodies, in_order
from te_inductor.passes.graph.owners import from_parameter, owner_of
from te_inductor.passes.graph.values import is_gathered, value
from te_inductor.passes.pre_grad.decide import gemm_kernels
from te_inductor.passes.pre_grad.plan import Candidate, Plan, Unlowered
from te_inductor.presentation.report import Site


def report_sites(plan: Plan) -> None:
    """Write down what was decided, before the rewrite erases the matched nodes."""
    plan.outcome.weights |= _weights(plan)
    paths = {candidate.match.node: candidate.fqn for candidate in plan.candidates}
    joined = {site.match.node: group for group in plan.merged for site in group}
    calls = Counter(in_order(plan.gm))
    flops = {
        product.node: None if product.flops is None else product.flops * max(calls[product.node], 1)
        for product in plan.products.all
    }
    kernels = {}
    for candidate in plan.candidates:
        group = joined.get(candidate.match.node, [])
        merged = tuple(paths[site.match.node] for site in group)
        rows = sum(site.match.sizes[1] for site in group) or None  # of the weight of the GEMM that they are
        fprop, *others = _sites(plan, candidate, merged, rows)
        fprop = replace(fprop, flops=flops.get(candidate.match.node), wire="; ".join(candidate.wires) or None)
        plan.outcome.report.sites.extend((fprop, *others))
        kernels[candidate.match.node] = fprop.kernel
    plan.outcome.report.sites.extend(map(_unlowered_site, plan.products.unlowered))
    for product in plan.products.all:
        low = kernels.get(product.node, "high_precision") != "high_precision"
        plan.outcome.report.flops.add(flops[product.node], low)


def _weights(plan: Plan) -> dict[str, torch.nn.Parameter]:
    """The parameters that sites multiply by, where each is a parameter or made of one."""
    bodies, found = Bodies(plan.gm), {}
    multiplied = [(site.fqn, site.match.weight) for site in plan.candidates]
    others = (
        (site.fqn, bodies.outer(operand)) for site in plan.products.unlowered for operand in site.product.operands
    )
    multiplied += [(fqn, operand) for fqn, operand in others if from_parameter(operand)]
    for fqn, node in multiplied:
        owner = owner_of(node, bodies)
        if owner is not None:
            found[fqn] = bodies.held(owner.parameter, plan.inputs)
    return {fqn: weight for fqn, weight in found.items() if isinstance(weight, torch.nn.Parameter)}


def _sites(plan: Plan, candidate: Candidate, merged: tuple[str, ...], rows: int | None) -> Iterator[Site]:
    recipe = "none" if candidate.recipe is None else candidate.recipe.name
    backward = candidate.recipe.backward if candidate.recipe is not None and candidate.low else None
    match = candidate.match
    elsewhere = plan.options.wgrad != "grad" and "wgrad" not in candidate.unmet
    turns = candidate.low and candidate.slots is not None and candidate.slots.wgrad.transposes and not elsewhere
    turned = turns and match.turned
    for (gemm, shapes), (_, merged_shapes) in zip(match.gemms(turned=turned), match.gemms(rows), strict=True):
        accumulates = gemm == "wgrad" and plan.options.wgrad == "main_grad" and elsewhere
        # Weights that FSDP2 gathered have a scale each, so that nothing but wgrad is one GEMM; those that are turned have
        # one each.
        one = merged if (not turned if gemm == "wgrad" else not is_gathered(match.weight)) else ()
        if candidate.low and candidate.slots is not None and getattr(candidate.slots, gemm).is_high:
            one = ()  # a product for each weight
        sizes = merged_shapes if one and not accumulates else shapes
        kernel, library = _kernel(plan, candidate, gemm, sizes, accumulates, turned and gemm == "wgrad")
        if library is not None:
            plan.outcome.libraries.add(library)
        refusal = candidate.refusal or (candidate.emulated if kernel == EMULATED.name else None)
        reason = None if refusal is None else str(refusal)
        named = recipe if backward is None else backward.name_of(gemm) or recipe
        outside = refusal is not None and refusal.outside
        yield Site(
            candidate.fqn, candidate.rule.pattern, gemm, plain(shapes), named, kernel, reason, one, outside=outside
        )


def _unlowered_site(site: Unlowered) -> Site:
    product, recipe = site.product, "none" if site.recipe is None else site.recipe.name
    reason = None if site.recipe is None and not site.outside else str(site.refusal)
    sizes, flops = plain(product.sizes), product.flops if site.gemm == "fprop" else None
    return Site(
        site.fqn, product.pattern, site.gemm, sizes, recipe, "high_precision", reason, flops=flops, outside=site.outside
    )


def _kernel(
    plan: Plan, candidate: Candidate, gemm: str, shapes: tuple[Any, int, int], accumulates: bool, turned: bool
) -> tuple[str, Kernel | None]:
    """Its name, and what has to be built for it."""
    match, choice = candidate.match, None
    if candidate.stored:
        if gemm == "fprop":
            choice = gemm_kernels.of_stored_weight(match, candidate.recipe, plan.program)
        elif gemm == "dgrad":
            choice = gemm_kernels.of_stored_gradient(match, candidate.recipe, shapes, plan.program)
        return "high_precision" if choice is None else choice.name, None  # built where it is lowered
    if candidate.low and match.knows_gradient:
        return ("cublaslt" if targets.of(value(match.weight).device).is_gpu else "eager"), None
    if candidate.low and candidate.slots is not None:
        choice = gemm_kernels.choose(match, candidate.slots, gemm, shapes, plan.program, accumulates, turned)
        return choice.name, choice.kernel
    return "high_precision", None


def plain(shapes: tuple[Any, int, int]) -> tuple[Any, int, int]:
    m, n, k = (size if isinstance(size, int) else str(size) for size in shapes)
    return m, n, k  # type: ignore[return-value]
