"""What delayed scaling asks of a site: that it can keep state, and the ranks over which its quantizers reduce their
amaxes, Note [Amax groups]."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch import distributed as dist

from te_inductor import compat
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.distributed import amax_groups
from te_inductor.distributed.amax_groups import OWN, AmaxGroup
from te_inductor.distributed.parallel import Parallel
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import DelayedScaling, Recipe, resolve
from te_inductor.runtime.state import store
from te_inductor.runtime.state.state_inputs import StateReader


def refusal(match: Match, bodies: Bodies, transforms: str | None) -> Refusal | None:
    """Why a site can keep no state; `transforms` of torch.func that it is in let nothing outside of them be written."""
    if transforms is not None:
        return Refusal("delayed scaling inside a transform of torch.func (%s), which keeps no state", transforms)
    if not bodies.reaches(match.node.graph):
        return Refusal("delayed scaling inside a control-flow body, which its state does not reach")
    owner = owner_of(match.weight, bodies)
    if owner is None:
        return Refusal("delayed scaling keeps its state with a parameter, and the weight comes from none")
    return None


def parameter_of(match: Match, bodies: Bodies, examples: Sequence[Any]) -> tuple[fx.Node | None, Tensor | None]:
    """The parameter of a site with which state is kept, as a node and as it is; None where there is none."""
    owner = owner_of(match.weight, bodies)
    parameter = None if owner is None else bodies.held(owner.parameter, examples)
    return None if owner is None else owner.parameter, parameter if isinstance(parameter, Tensor) else None


def moved_to(match: Match, bodies: Bodies, examples: Sequence[Any], recipe: Recipe) -> Recipe | None:
    """The recipe of a site that a guard has moved, Note [Layers that a guard moves], whose backward is as it was; None
    where none has."""
    parameter = parameter_of(match, bodies, examples)[1]
    if parameter is None or not store.is_moved(parameter):
        return None
    found: Recipe = resolve(store.recipe_behind(parameter))  # type: ignore[assignment]  # none of their names is "none"
    return found.with_backward(recipe.backward)


def guard_on_moves(sites: Iterable[Candidate], bodies: Bodies, examples: Sequence[Any]) -> bool:
    """Have Dynamo compile anew where a guard moves a layer, or state is loaded that says so. False where it cannot be
    asked."""
    asked = [site for site in sites if (site.low and site.delayed) or site.precision.moved]
    nodes = {parameter_of(site.match, bodies, examples)[0]: site.precision.moved for site in asked}
    return all(
        node is not None and compat.guard_on_tensor(node, partial(_is_moved, moved), "te_inductor_is_moved")
        for node, moved in nodes.items()
    )


def _is_moved(expected: bool, parameter: Tensor) -> bool:
    return store.is_moved(parameter) is expected


class GroupsOf:
    """Finds the group of each quantizer of one graph. What it goes by is guarded on, since modules of one class run one
    graph, and a module may be wrapped or sharded after its first call."""

    def __init__(self, graph: fx.Graph, options: Options, examples: Sequence[Any], held: Mapping[str, Tensor]) -> None:
        self.graph, self.options, self.examples, self.held = graph, options, examples, held
        self.found: dict[int | str, AmaxGroup | None] = {}  # by the parameter

    def of(self, reader: StateReader) -> AmaxGroup | None:
        """The group of a quantizer that records amaxes; None where nothing tells."""
        if not reader.key.recipe.reduce_amax:
            return OWN
        if self.options.amax_group is not None:
            return self.options.amax_group  # type: ignore[no-any-return]
        place = reader.parameter
        if place not in self.found:
            if not self.found:
                compat.guard_on_wrappers()
            self.found[place] = self._found(place)
        return self.found[place]

    def _found(self, place: int | str) -> AmaxGroup | None:
        parameter = self._parameter(place)
        if parameter is None:
            return None
        if amax_groups.several_ranks() and not isinstance(place, str):
            node = self.graph.find_nodes(op="placeholder")[place]
            mesh = amax_groups.mesh_of(parameter)
            compat.guard_on_tensor(node, partial(_has_mesh, mesh), "te_inductor_has_mesh")
        return amax_groups.of_parameter(parameter)

    def wait(self, readers: Iterable[StateReader]) -> bool:
        """Whether a later graph updates the scales of these quantizers: Note [Microbatches]."""
        waits = compat.ddp_reduces_later()
        for place in dict.fromkeys(reader.parameter for reader in readers):
            parameter = self._parameter(place)
            reduces = None if parameter is None else amax_groups.reduces_gradient(parameter)
            if reduces is not None and not isinstance(place, str):
                node = self.graph.find_nodes(op="placeholder")[place]
                compat.guard_on_tensor(node, partial(_reduces_gradient, reduces), "te_inductor_reduces_gradient")
            waits = waits or reduces is False
        return waits

    def _parameter(self, place: int | str) -> Tensor | None:
        if isinstance(place, str):
            return self.held[place]
        found = self.examples[place] if self.examples else None
        return found if isinstance(found, Tensor) else None


def _reduces_gradient(expected: bool, parameter: Tensor) -> bool:
    return amax_groups.reduces_gradient(parameter) is expected


def _has_mesh(mesh: AmaxGroup | None, parameter: Tensor) -> bool:
    return amax_groups.mesh_of(parameter) == mesh


def of_shards(recipe: DelayedScaling, options: Options, parallel: Parallel) -> Refusal | None:
    """Why shards may not be cast before they are gathered: their ranks would not have one scale."""
    if parallel.gathered is None and parallel.scattered is None:
        return None
    return one_scale(recipe, options, dist.get_process_group_ranks(amax_groups.process_group(parallel.group)))


def of_mesh_shards(recipe: DelayedScaling, options: Options, shard: Tensor) -> Refusal | None:
    """The same of a DTensor's."""
    mesh = amax_groups.of_mesh(compat.mesh_of_dtensor(shard))
    return one_scale(recipe, options, mesh.ranks)


def one_scale(recipe: DelayedScaling, options: Options, ranks: Sequence[int]) -> Refusal | None:
    """The same of any ranks."""
    if not recipe.reduce_amax:
        return Refusal(
            "shards that are gathered in FP8 have one scale, and DelayedScaling(reduce_amax=False) gives each own"
        )
    if options.amax_group is None:
        return None
    if not set(ranks) <= set(options.amax_group.ranks):  # type: ignore[attr-defined]
        return Refusal(
            "shards that are gathered in FP8 have one scale, and option 'amax_group' is not all of their ranks"
        )
    return None


def not_over_group(recipe: DelayedScaling | None, options: Options) -> Refusal | None:
    """Why a site does not reduce amaxes over the group that the option names."""
    if options.amax_group and recipe is not None and not recipe.reduce_amax:
        return Refusal("its recipe is DelayedScaling(reduce_amax=False)")
    return None
