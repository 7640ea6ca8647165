"""What the passes of one compile know: the sites that they found, and what they decided about each."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor.config import Options
from te_inductor.diagnostics import Refusal, Report
from te_inductor.passes.graph import regions, writes
from te_inductor.passes.pre_grad.attention.site import Attention
from te_inductor.passes.pre_grad.sites import contractions
from te_inductor.passes.pre_grad.sites.products import Product
from te_inductor.passes.pre_grad.sites.rule import Match, Rule
from te_inductor.presentation.paths import names_of
from te_inductor.recipes import Recipe, Slots
from te_inductor.recipes.regions import Region
from te_inductor.runtime.extra_inputs import ExtraInputs
from te_inductor.runtime.state.state_inputs import StateInputs
from te_inductor.templates.cutlass.scaled_mm import Kernel


@dataclass
class Candidate:
    """A place that a rule matched, and what the passes decide about it."""

    rule: Rule
    match: Match
    module: str  # whose forward it is in
    inner: str = ""  # where in it the weight is, if a module inside holds it; of experts also the weight's name
    regions: tuple[Region | None, ...] = (None,)  # of autocast; more than one where a body has callers in several
    recipe: Recipe | None = None
    slots: Slots | None = None  # the recipe's, for this site
    stored: bool = False  # its weight is stored in low precision, which is its recipe: there is nothing to rewrite
    by_policy: bool = False  # named by a policy entry
    refusal: Refusal | None = None  # why it stays in high precision
    weighed: bool = False  # whether the size rule was asked about it
    unplaced: Refusal | None = None  # why its backward is not known, in a graph that has both
    # Why its weight, which the graph gathers, is gathered in high precision; None where bytes of its cast are, or nothing is
    ungathered: Refusal | None = None
    exchanges: list[str] = field(default_factory=list)  # of experts: the groups whose ranks exchange rows around it
    wires: list[str] = field(default_factory=list)  # what a report says of exchanges around it
    emulated: Refusal | None = None  # why its GEMMs multiply in high precision what low precision holds
    unmet: dict[str, Refusal] = field(default_factory=dict)  # what the options ask for and it does not do: why

    @property
    def fqn(self) -> str:
        """As reports and policies have it."""
        return _joined(self.module, self.inner)

    @property
    def names(self) -> tuple[str, ...]:
        """By which a policy's globs may name it."""
        return tuple(dict.fromkeys((*names_of(self.fqn), *names_of(self.module))))

    @property
    def gathers(self) -> bool:
        """Whether the graph gathers its weight in low precision."""
        return self.low and self.match.gather is not None and self.ungathered is None

    @property
    def low(self) -> bool:
        """Whether the site is to be rewritten."""
        return self.recipe is not None and self.refusal is None and not self.stored


@dataclass
class Unlowered:
    """A product with a weight that no rule matched, or one for a weight's gradient that is no layer's."""

    product: Product
    module: str  # whose forward it is in
    inner: str  # as of a candidate
    regions: tuple[Region | None, ...]
    refusal: Refusal
    recipe: Recipe | None = None  # that it would have
    gemm: str = "fprop"

    @property
    def fqn(self) -> str:
        """As reports and policies have it."""
        return _joined(self.module, self.inner)

    @property
    def names(self) -> tuple[str, ...]:
        """By which a policy's globs may name it."""
        return tuple(dict.fromkeys((*names_of(self.fqn), *names_of(self.module))))


def _joined(*paths: str) -> str:
    return ".".join(filter(None, paths))


@dataclass
class Plan:
    """What the passes of one compile know."""

    gm: fx.GraphModule
    options: Options
    inputs: Sequence[Any] = ()  # the graph's, as Dynamo hands them to a backend: parameters are the model's own
    inlined: dict[fx.Node, contractions.Inlined] = field(default_factory=dict)  # layers that were written otherwise
    candidates: list[Candidate] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)  # all of the graph, the candidates' too
    unlowered: list[Unlowered] = field(default_factory=list)
    merged: list[list[Match]] = field(default_factory=list)  # sites that are one GEMM
    report: Report = field(default_factory=Report)
    weights: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # of sites, by their module paths
    libraries: set[Kernel] = field(default_factory=set)  # CUTLASS kernels that its GEMMs will be
    extra_inputs: list[ExtraInputs] = field(default_factory=list)  # what the rewritten graph takes besides its inputs
    parameters: dict[fx.Node, str] = field(default_factory=dict)  # names, of a graph that Dynamo did not make
    leaves: bool = False  # whether the graph is that of a program that leaves this process

    backward: set[fx.Node] = field(default_factory=set)  # products that are part of a site's backward

    @property
    def state(self) -> StateInputs | None:
        """Those of delayed scaling."""
        return next((kind for kind in self.extra_inputs if isinstance(kind, StateInputs)), None)

    @property
    def reads_active_region(self) -> bool:
        """Whether the thread's autocast has a say in any site."""
        return any(None in site.regions for site in self.candidates) or any(
            None in site.regions for site in self.unlowered
        )

    @property
    def is_ours(self) -> bool:
        """Whether anything of ours is in the graph, or can come out of it: a layer in low precision, an op by hand, or
        a tensor subclass, whose operations only tracing shows."""
        if any(site.low or site.stored for site in self.candidates):
            return True
        if any(is_traceable_wrapper_subclass(given) for given in self.inputs):
            return True
        nodes = (node for module in self.graph_modules() for node in module.graph.nodes)
        return any(getattr(node.target, "namespace", None) == "te_inductor" for node in nodes)

    @functools.cached_property
    def regions_of(self) -> dict[fx.Node, list[Region | None]]:
        """The regions of autocast that each node is in. Asked for once, behind the passes that put nodes in."""
        return regions.regions_of(self.gm)

    @functools.cached_property
    def writes(self) -> writes.Writes:
        """What the graph writes, and where. Asked for once, behind the passes that put nodes in."""
        return (
            writes.of_aten(self.gm.graph)
            if self.parameters or self.leaves
            else writes.of_dynamo(self.gm.graph, self.inputs)
        )

    def graph_modules(self) -> list[fx.GraphModule]:
        """The graph and the bodies of its higher-order ops, such as checkpoint's."""
        return [module for module in self.gm.modules() if isinstance(module, fx.GraphModule)]
