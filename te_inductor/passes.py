"""The passes of `backend.PASSES`, each over one `Plan`. They read and rewrite the Dynamo graph, before autograd sees it."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from te_inductor import recipes
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal, Report, Site
from te_inductor.patterns import RULES, attention, support
from te_inductor.patterns.module_path import module_path
from te_inductor.patterns.rule import Match, Rule
from te_inductor.recipes import Recipe


@dataclass
class Candidate:
    """A place that a rule matched, and what the passes decide about it."""

    rule: Rule
    match: Match
    fqn: str
    recipe: Recipe | None = None
    refusal: Refusal | None = None


@dataclass
class Plan:
    """What the passes of one compile know."""

    gm: fx.GraphModule
    options: Options
    candidates: list[Candidate] = field(default_factory=list)
    report: Report = field(default_factory=Report)

    def graph_modules(self) -> list[fx.GraphModule]:
        """The graph and the bodies of its higher-order ops, such as checkpoint's."""
        return [module for module in self.gm.modules() if isinstance(module, fx.GraphModule)]


def inline_attention(plan: Plan) -> None:
    """Open `F.multi_head_attention_forward`, one node for Dynamo, so that its projections can be seen."""
    for module in plan.graph_modules():
        attention.inline(module.graph)
        module.recompile()


def match_sites(plan: Plan) -> None:
    """Find every linear layer."""
    for module in plan.graph_modules():
        for node in module.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            for rule in RULES:
                match = rule.match(node)
                if match is not None:
                    plan.candidates.append(Candidate(rule, match, module_path(node)))
                    break


def resolve_policy(plan: Plan) -> None:
    """Give each site its recipe: the first policy glob that matches its module path, else the default recipe."""
    default = recipes.resolve(plan.options.recipe)
    policy = [(glob, recipes.resolve(spec)) for glob, spec in plan.options.policy]
    used = set()
    for candidate in plan.candidates:
        candidate.recipe = default
        for glob, recipe in policy:
            if fnmatchcase(candidate.fqn, glob):
                candidate.recipe = recipe
                used.add(glob)
                break
    plan.report.unused_policy.extend(glob for glob, _ in policy if glob not in used)


def check_sites(plan: Plan) -> None:
    """Ask each rule whether the site can run as it should; a refusal leaves the site in high precision."""
    for candidate in plan.candidates:
        if candidate.recipe is not None:
            match = candidate.match
            candidate.refusal = candidate.rule.check(match) or support.blocks(
                candidate.recipe.slots(), support.value(match.weight), *match.sizes[1:]
            )


def report_sites(plan: Plan) -> None:
    """Write down what was decided, before the rewrite erases the matched nodes."""
    for candidate in plan.candidates:
        plan.report.sites.extend(_sites(candidate, plan.options))


def rewrite_sites(plan: Plan) -> None:
    """Replace what passed by `te_inductor.linear`; last first, as a match's input may be the node of an earlier match."""
    for candidate in reversed(plan.candidates):
        if candidate.recipe is not None and candidate.refusal is None:
            candidate.rule.rewrite(candidate.match, candidate.recipe)
    for module in plan.graph_modules():
        module.recompile()


def _sites(candidate: Candidate, options: Options) -> list[Site]:
    recipe = "none" if candidate.recipe is None else candidate.recipe.name
    low = candidate.recipe is not None and candidate.refusal is None
    device = candidate.match.node.meta["example_value"].device
    blocked = candidate.recipe is not None and candidate.recipe.slots().fprop.blocked
    kernel = _gemm_kernel(device, options, blocked) if low else "high_precision"
    reason = None if candidate.refusal is None else str(candidate.refusal)
    return [
        Site(candidate.fqn, candidate.rule.pattern, gemm, _plain(shapes), recipe, kernel, reason)
        for gemm, shapes in candidate.match.gemms()
    ]


def _gemm_kernel(device: torch.device, options: Options, blocked: bool) -> str:
    """cuBLASLt on CUDA, unless Inductor measures it against its Triton templates (none is right for scales of blocks);
    generated code elsewhere."""
    measured = "max-autotune" in (options.mode or "") or any(
        options.inductor.get(name) for name in ("max_autotune", "max_autotune_gemm")
    )
    return "cublaslt" if device.type == "cuda" and (blocked or not measured) else "inductor"


def _plain(shapes: tuple[Any, int, int]) -> tuple[Any, int, int]:
    m, n, k = (size if isinstance(size, int) else str(size) for size in shapes)
    return m, n, k  # type: ignore[return-value]
