"""The pass that writes down what was decided, as `explain` and the warning of a compile tell it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from te_inductor.diagnostics import Site
from te_inductor.passes.graph.bodies import in_order
from te_inductor.passes.pre_grad.decide import (
    gemm_kernels,
)
from te_inductor.passes.pre_grad.decide.gemm_kernels import Choice
from te_inductor.passes.pre_grad.plan import Candidate, Plan, Unlowered


def report_sites(plan: Plan) -> None:
    """Write down what was decided, before the rewrite erases the matched nodes."""
    paths = {candidate.match.node: candidate.fqn for candidate in plan.candidates}
    joined = {match.node: group for group in plan.merged for match in group}
    flops = {product.node: product.flops for product in plan.products}
    kernels = {}
    for candidate in plan.candidates:
        group = joined.get(candidate.match.node, [])
        merged = tuple(paths[match.node] for match in group)
        rows = sum(match.sizes[1] for match in group) or None  # of the weight of the GEMM that they are
        fprop, *others = _sites(plan, candidate, merged, rows)
        plan.report.sites.extend((replace(fprop, flops=flops.get(candidate.match.node)), *others))
        kernels[candidate.match.node] = fprop.kernel
    plan.report.sites.extend(map(_unlowered_site, plan.unlowered))
    calls = Counter(in_order(plan.gm))
    for product in plan.products:
        low = kernels.get(product.node, "high_precision") != "high_precision"
        known = None if product.flops is None else product.flops * max(calls[product.node], 1)
        plan.report.flops.add(known, low)


def _sites(plan: Plan, candidate: Candidate, merged: tuple[str, ...], rows: int | None) -> Iterator[Site]:
    recipe = "none" if candidate.recipe is None else candidate.recipe.name
    refusal = candidate.refusal or candidate.emulated
    reason = None if refusal is None else str(refusal)
    match = candidate.match
    for (gemm, shapes), (_, merged_shapes) in zip(match.gemms(), match.gemms(rows), strict=True):
        accumulates = gemm == "wgrad" and plan.options.wgrad == "main_grad" and "wgrad" not in candidate.unmet
        choice = _choice(plan, candidate, gemm, shapes if accumulates else merged_shapes, accumulates)
        if choice.library is not None:
            plan.libraries.add(choice.library)
        yield Site(candidate.fqn, candidate.rule.pattern, gemm, plain(shapes), recipe, choice.name, reason, merged)


def _unlowered_site(site: Unlowered) -> Site:
    product, recipe = site.product, "none" if site.recipe is None else site.recipe.name
    reason = None if site.recipe is None else str(site.refusal)
    sizes = plain(product.sizes)
    return Site(site.fqn, product.pattern, "fprop", sizes, recipe, "high_precision", reason, flops=product.flops)


def _choice(plan: Plan, candidate: Candidate, gemm: str, shapes: tuple[Any, int, int], accumulates: bool) -> Choice:
    if candidate.stored:
        if gemm == "fprop":
            return gemm_kernels.of_stored_weight(candidate.match, candidate.recipe, plan.options)
    elif candidate.low and candidate.slots is not None:
        if candidate.emulated:
            return Choice("emulated")
        return gemm_kernels.choose(candidate.match, candidate.slots, gemm, shapes, plan.options, accumulates)
    return Choice("high_precision")


def plain(shapes: tuple[Any, int, int]) -> tuple[Any, int, int]:
    m, n, k = (size if isinstance(size, int) else str(size) for size in shapes)
    return m, n, k  # type: ignore[return-value]
