"""What the passes of one compile know: the sites that they found, and what they decided about each."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.kernels.cutlass_tiles import Kernel
from te_inductor.kernels.problem import Program
from te_inductor.passes.graph import operators, regions, writes
from te_inductor.passes.pre_grad.attention.site import Attention
from te_inductor.passes.pre_grad.loss.reading import Reading
from te_inductor.passes.pre_grad.sites import contractions
from te_inductor.passes.pre_grad.sites.exchanges import Exchanges
from te_inductor.passes.pre_grad.sites.products import Product
from te_inductor.passes.pre_grad.sites.rule import Match, Rule
from te_inductor.presentation.paths import names_of
from te_inductor.presentation.report import Report
from te_inductor.recipes import DelayedScaling, Recipe, Slots
from te_inductor.recipes.regions import Region
from te_inductor.runtime.extra_inputs import ExtraInputs
from te_inductor.runtime.omitted_logits import OmittedOutput
from te_inductor.runtime.state.state_inputs import StateInputs


@dataclass(frozen=True)
class SitePlace:
    """The place of a product in the model."""

    module: str  # whose forward it is in
    inner: str = ""  # where in it the weight is, if a module inside holds it; of experts also the weight's name
    regions: tuple[Region | None, ...] = (None,)  # of autocast; more than one where a body has callers in several

    @property
    def fqn(self) -> str:
        """The name in reports and policies."""
        return ".".join(filter(None, (self.module, self.inner)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a policy's globs may know it."""
        return tuple(dict.fromkeys((*names_of(self.fqn), *names_of(self.module))))


@dataclass(frozen=True)
class Precision:
    """The precision in which a site shall run, and what says so."""

    recipe: Recipe | None = None
    slots: Slots | None = None  # the recipe's, for this site
    by_policy: bool = False  # named by a policy entry
    moved: bool = False  # its recipe is the one to which a guard has moved it
    stored: bool = False  # its weight is stored in low precision, which is its recipe: there is nothing to rewrite
    # Whether ranks that reduce amaxes with this one have it in low precision; None where none do.
    form: bool | None = None
    learns: bool = False  # or each forward stores it, and it learns
    in_order: bool = False  # its forward is summed in one order, also where it stays in high precision


class _Placed:
    """What has a place and a precision."""

    place: SitePlace
    precision: Precision

    @property
    def fqn(self) -> str:
        return self.place.fqn

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def recipe(self) -> Recipe | None:
        return self.precision.recipe

    @property
    def slots(self) -> Slots | None:
        return self.precision.slots

    @property
    def by_policy(self) -> bool:
        return self.precision.by_policy

    @property
    def stored(self) -> bool:
        return self.precision.stored


@dataclass
class Candidate(_Placed):
    """A layer that a rule matched, and what the passes decide about it."""

    rule: Rule
    match: Match
    place: SitePlace
    precision: Precision = Precision()
    refusal: Refusal | None = None  # why it stays in high precision
    weighed: bool = False  # whether the size rule was asked about it
    emulated: Refusal | None = None  # why its GEMMs multiply in high precision what low precision holds
    unmet: dict[str, Refusal] = field(default_factory=dict)  # what the options ask for and it does not do: why

    @property
    def low(self) -> bool:
        """Whether the site is to be rewritten."""
        return self.recipe is not None and self.refusal is None and not self.stored

    @property
    def replaced(self) -> bool:
        """Whether an op of ours stands in its place, or its weight is one of ours."""
        return self.low or self.stored or self.precision.in_order

    @property
    def delayed(self) -> DelayedScaling | None:
        """Its recipe, if that keeps state."""
        return self.recipe if isinstance(self.recipe, DelayedScaling) else None

    @property
    def gathers(self) -> bool:
        """Whether the graph gathers its weight in low precision."""
        return self.low and self.match.gather is not None and self.match.gather.refusal is None

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The groups whose ranks exchange rows around it."""
        found = self.match.part(Exchanges)
        return () if found is None else found.groups

    @property
    def wires(self) -> list[str]:
        """What a report says of its tensors that go between ranks, or of a weight that learns as it is going to be
        stored."""
        if self.precision.learns:
            return ["each forward stores the weight, which learns; quantize_ stores it once, for inference"]
        if not self.low or self.slots is None:
            return []
        return [text for part in self.match.parts for text in part.describe(self.slots)]


@dataclass
class Unlowered(_Placed):
    """A product with a weight that no rule matched, or one for a weight's gradient that is no layer's."""

    product: Product
    place: SitePlace
    refusal: Refusal
    gemm: str = "fprop"
    precision: Precision = Precision()  # that it would have

    @property
    def outside(self) -> bool:
        """Whether no recipe is for such a product, so that high precision is no fallback."""
        return self.refusal.outside


@dataclass
class Products:
    """The matrix products of a graph."""

    all: list[Product] = field(default_factory=list)  # the candidates' too
    unlowered: list[Unlowered] = field(default_factory=list)
    backward: set[fx.Node] = field(default_factory=set)  # those that are part of a site's backward
    inlined: dict[fx.Node, contractions.Inlined] = field(default_factory=dict)  # layers that were written otherwise
    # Losses of output layers, each with the reason why it needs its logits, if it does.
    losses: list[tuple[Candidate, Reading, Refusal | None]] = field(default_factory=list)


@dataclass
class Outcome:
    """What a compile has found besides its graph."""

    report: Report = field(default_factory=Report)
    weights: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # of sites, by their module paths
    libraries: set[Kernel] = field(default_factory=set)  # CUTLASS kernels that its GEMMs will be
    extra_inputs: list[ExtraInputs] = field(default_factory=list)  # what the rewritten graph takes besides its inputs
    omitted: list[OmittedOutput] = field(default_factory=list)  # outputs that are left out: logits

    @property
    def state(self) -> StateInputs | None:
        """The state inputs of delayed scaling."""
        return next((kind for kind in self.extra_inputs if isinstance(kind, StateInputs)), None)


@dataclass
class Plan:
    """What the passes of one compile know."""

    gm: fx.GraphModule
    options: Options
    inputs: Sequence[Any] = ()  # the graph's, as Dynamo hands them to a backend: parameters are the model's own
    candidates: list[Candidate] = field(default_factory=list)
    merged: list[list[Candidate]] = field(default_factory=list)  # sites that are one GEMM
    attention: list[Attention] = field(default_factory=list)
    products: Products = field(default_factory=Products)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def leaves(self) -> bool:
        """Whether the graph is that of a program that leaves this process."""
        return False

    @property
    def program(self) -> Program:
        """What its products are part of."""
        given = self.options.inductor
        asked = any(given.get(name) for name in ("max_autotune", "max_autotune_gemm"))
        cpp = self.leaves or bool(given.get("cpp_wrapper", inductor.cpp_wrapper))
        return Program("max-autotune" in (self.options.mode or "") or asked, cpp, self.leaves)

    def path_of(self, parameter: fx.Node) -> str | None:
        """The name of a parameter, of a graph that names them itself."""
        return None

    @property
    def experts(self) -> list[Candidate]:
        """The layers of experts."""
        return [site for site in self.candidates if site.match.groups]

    @property
    def reads_active_region(self) -> bool:
        """Whether the thread's autocast has a say in any site."""
        return any(None in site.place.regions for site in (*self.candidates, *self.products.unlowered))

    @property
    def is_ours(self) -> bool:
        """Whether anything of ours is in the graph, or can come out of it: a layer in low precision, an op by hand, or
        a tensor subclass, whose operations only tracing shows."""
        if self.options.batch_invariant or any(site.low or site.stored for site in self.candidates):
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
        return writes.DynamoWrites(self.gm.graph, self.inputs)

    def may_autocast(self, device: torch.device) -> bool:
        """Whether torch.autocast, around the graph or within it, may cast operands of products on a device."""
        around = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        nodes = (node for module in self.graph_modules() for node in module.graph.nodes)
        return around or any("autocast" in operators.name(node) for node in nodes)

    def graph_modules(self) -> list[fx.GraphModule]:
        """The graph and the bodies of its higher-order ops, such as checkpoint's."""
        return [module for module in self.gm.modules() if isinstance(module, fx.GraphModule)]


@dataclass
class LoweredPlan(Plan):
    """The plan of a graph that Dynamo did not make."""

    parameters: dict[fx.Node, str] = field(default_factory=dict)  # their names
    is_program: bool = False  # and no traced graph

    @property
    def leaves(self) -> bool:
        return self.is_program

    def path_of(self, parameter: fx.Node) -> str | None:
        return self.parameters.get(parameter)

    @functools.cached_property
    def writes(self) -> writes.Writes:
        return writes.AtenWrites(self.gm.graph)
