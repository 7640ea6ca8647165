"""Sites under delayed scaling: their state stands in the graph as inputs, one set a quantizer.

# Note [A step under delayed scaling]
What the rewritten graph does, in this order::

    read = read_scales(states)              copies of all scales, for this forward and its backward
    step = delayed_step(leaf, …)            nothing now; in the backward, behind all sites: update_scales of the gradients
    linear(x, w, …, known, step, grad_amax) casts with the known scales; in the backward: record_amax(dy, grad_amax)
    record_amax(x, state)                   beside the cast, whose kernel it joins; not under no_grad
    update_scales(states, …, read)          of inputs and weights, at the end

The copies matter: the backward, and a checkpoint that recomputes, read them after the update has changed the state.
What the forward changes (state of inputs and weights) the backward leaves alone, and the other way round: AOTAutograd
hands an input's changes from the forward to the backward by value, which would undo what another microbatch's forward
did between. There is one update, and one step, for each group of ranks that reduces amaxes (Note [Amax groups]), as a
rule one. The update takes the copies, and does nothing with them, so that the forward makes them all: what a
forward's outputs do not hang on, as in ``y + 0 * unused(x)``, AOTAutograd's partitioner leaves to the backward, behind
the update. Sites that quantize the same tensor share its quantizer, so that it is cast once. Where the graph writes it
between two sites, each reads other values: both amaxes are recorded, and the sites have a quantizer each: Note [Nodes
and values].

# Note [Microbatches]
Ranks may have other numbers of microbatches where these send nothing: in DistributedDataParallel's `no_sync()`, and
under FSDP2 with `set_requires_gradient_sync(False)` and weights that stay gathered. A reduction of amaxes would wait
for a rank that has no such microbatch, or take the amaxes of another one. So a graph whose backward reduces no
gradients reduces no amaxes either, but in a pipeline's stage, all of whose forwards are in `no_sync()`: its updates do
nothing (`ScaleUpdate.waits`), and what it records stays until the graph whose backward does reduce gradients, to which
all ranks come equally often, takes the largest amaxes of all microbatches and of all ranks, as those of one step.
Dynamo guards on what tells the two graphs apart, and compiles both. The microbatches of a first step are all first
steps, and no graph is compiled anew for their number."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from te_inductor import compat, ops
from te_inductor.distributed import agreement, amax_groups
from te_inductor.distributed.amax_groups import OWN, AmaxGroup
from te_inductor.ops.layers.delayed_scales import Delayed
from te_inductor.ops.layers.parts import is_empty
from te_inductor.ops.sharded_weight import ranks_of
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import holder_path
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.graph.values import is_gathered, is_tensor, value
from te_inductor.passes.graph.writes import Writes
from te_inductor.passes.pre_grad.decide import merging
from te_inductor.passes.pre_grad.decide.delayed import GroupsOf
from te_inductor.passes.pre_grad.rewrite.extras import KeptCopies, append_input
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.state.misfits import COUNTS
from te_inductor.runtime.state.state_inputs import StateInput, StateInputs, StateReader
from te_inductor.runtime.state.state_sites import StateSite, weight_site
from te_inductor.runtime.state.store import Key


@dataclass
class _ScaleUpdates:
    """The quantizers whose scales one `update_scales` updates, as nodes of the root's graph."""

    tensors: list[fx.Node] = field(default_factory=list)
    states: list[StateInput] = field(default_factory=list)

    @property
    def sites(self) -> list[StateSite]:
        return [state.readers[0].key.site for state in self.states]


@dataclass(eq=False)
class _Quantizer:
    """One quantizer of the graph: its state as a node of the root's graph, and which it is in what read_scales reads."""

    state: StateInput
    place: int
    tensor: fx.Node
    group: AmaxGroup | None  # that reduces its amax; None where nothing tells


class SiteScales(NamedTuple):
    """What the layers of one call have of a step."""

    source: Delayed
    arguments: dict[str, Any]  # of `te_inductor.layers`
    of_weight: list[fx.Node]  # the weight's scale and reciprocal, which a gather casts by


_Groups = dict[AmaxGroup, _ScaleUpdates]  # by what is reduced at once


class DelayedSites:
    """The scales of the sites of one graph and one recipe. Ask for those of each, last first; then `finish`."""

    def __init__(
        self,
        bodies: Bodies,
        inputs: StateInputs,
        recipe: DelayedScaling,
        sites: list[tuple[str, Match]],
        merged: Sequence[Sequence[Match]],
        groups: GroupsOf,
        writes: Writes,
    ) -> None:
        self.bodies, self.inputs, self.slots = bodies, inputs, recipe.slots_of("")
        self.recipe: DelayedScaling = recipe.own  # type: ignore[assignment]  # of which the state is, whatever its backward
        self.groups, self.writes = groups, writes
        self.graph = bodies.root.graph
        self.paths = {match.node: path for path, match in sites}
        self.forward: _Groups = {}
        self.backward: _Groups = {}
        self.steps: dict[AmaxGroup, fx.Node] = {}  # of the backward
        self.without_group: list[str] = []  # sites
        # The groups of tensor-parallel layers, whose ranks run one graph anyway: it has other collectives, and what is
        # gathered in FP8 has to have one scale.
        self.in_step: set[AmaxGroup] = set()
        self.quantizers: dict[StateReader, _Quantizer] = {}
        self.shared: dict[StateReader, list[StateReader]] = {}
        self._share([match for _, match in sites], merged)
        self.recorded: dict[tuple[_Quantizer, fx.Node], fx.Node] = {}  # and the first site that reads what is recorded
        self.in_grad_mode = bodies.in_grad_mode()
        # torch may put grad-mode and autocast nodes before the inputs, as where DDP splits a graph.
        inputs_end = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(inputs_end):
            self.read = self.graph.call_function(ops.read_scales, ([],))
        self.steps_begin = self._first_in_grad_mode()
        self.known: dict[tuple[_Quantizer, bool], fx.Node] = {}

    def _first_in_grad_mode(self) -> fx.Node:
        """The node behind which the backward's token is made: autograd has to see it, before any site that trains."""
        enabled, behind = torch.is_grad_enabled(), False
        for node in self.graph.nodes:
            if node.target is torch._C._set_grad_enabled:
                enabled = bool(node.args[0])
            behind = behind or node is self.read
            if behind and enabled:
                return node  # type: ignore[no-any-return]
        return self.read

    def _share(self, sites: Sequence[Match], merged: Sequence[Sequence[Match]]) -> None:
        """Sites that read the same values of a tensor have one quantizer for it, and merged sites one a slot."""
        of_x: dict[fx.Node, list[Match]] = {}
        for match in sites:
            if value(match.weight).dim() == match.dims:  # each of an unrolled batch has an input of its own
                of_x.setdefault(match.x, []).append(match)
        readers = (
            [self._reader(match, match.weight, "input") for match in piece]
            for alike in of_x.values()
            for piece in merging.between_writes(alike, self.writes, lambda match: [match.x])
        )
        of_groups = (
            [self._reader(match, match.weight, slot) for match in group]
            for group in merged
            if group[0].node in self.paths
            for slot in ("weight", "grad_output")
        )
        for group in (*readers, *of_groups):
            joined = list(dict.fromkeys(other for reader in group for other in self.shared.get(reader, [reader])))
            self.shared |= dict.fromkeys(joined, joined)

    def scales(self, match: Match, x: fx.Node, weights: Sequence[fx.Node], gathered: bool) -> SiteScales:
        """The scales of layers that are one call, of which `match` is the first one, whose quantizers all have; inserts
        what records their operands. The weight's copies are kept, or `gathered` by the graph, or neither."""
        weight, kept = weights[0], match.part(KeptCopies)
        graph, training = x.graph, value(match.node).requires_grad
        of_x = self._quantizer(match, weight, "input")
        # A gathered weight was cast before the call, and has its state there.
        of_weight = None if is_gathered(match.weight) else self._quantizer(match, weight, "weight")
        if of_weight is None:
            self.inputs.stays = "FSDP2 gathers weights of its graph in FP8"
        of_both = self._known(of_weight, graph) if of_weight else []
        known, more = {"input": self._known(of_x, graph)}, dict[str, Any]()
        if of_both and not gathered:
            known["weight"] = of_both
        exchanging = self._exchanging(match, gathered)
        if exchanging:
            self.in_step |= {one.group for one in (of_x, of_weight) if one and one.group}
            self.inputs.groups |= exchanging
            self._note_exchanging([one for one in (of_x, of_weight) if one], exchanging)
        if training and self.slots.casts_gradient and not match.knows_gradient:
            of_grad = self._quantizer(match, weight, "grad_output")
            self._note_exchanging([of_grad] if exchanging else [], exchanging)
            known["grad_output"] = self._known(of_grad, graph)
            more["token"] = self.bodies.hand(self._step(of_grad.group or OWN), graph)
            more["grad_amax"] = self.bodies.hand(of_grad.tensor, graph)
            self._add(self.backward, of_grad)
        if training or match.node in self.in_grad_mode:  # a frozen layer that reads a frozen input needs its scales too
            self._record(of_x, [x], match)
            if kept and of_weight:  # recorded where the weight is looked at
                self._add(self.forward, of_weight)
            elif of_weight and gathered:
                self._record_gathered(of_weight, match)
            elif of_weight:
                self._record(of_weight, weights, match)
        if kept and of_weight:
            kept.weight.state, kept.weight.records = of_weight.state, of_weight.state.recorded
        more["known"] = list(itertools.chain(*known.values()))
        return SiteScales(Delayed(self.recipe, tuple(known)), more, of_both)

    def _exchanging(self, match: Match, gathers: bool) -> set[AmaxGroup]:
        """The ranks with which a layer exchanges tensors; none where its dimension of a mesh has one rank."""
        names = [one.group for one in (match.parallel, match.arrives, match.leaves) if one is not None]
        if gathers and match.gather is not None:
            names.append(ranks_of(value(match.gather.shard)).group)
        groups = {amax_groups.of_process_group(amax_groups.process_group(name)) for name in names}
        return groups - {OWN}

    def _note_exchanging(self, quantizers: Iterable[_Quantizer], groups: set[AmaxGroup]) -> None:
        """Note quantizers of a layer that exchanges tensors with these groups' ranks."""
        ranks = {rank for group in groups for rank in group.ranks}
        for one in quantizers:
            self.inputs.exchanging.append(one.state.readers[0])
            one.state.alike = one.group is not None and ranks <= set(one.group.ranks)

    def finish(self) -> None:
        """Fill in what only all sites together know."""
        states = [quantizer.tensor for quantizer in self.quantizers.values()]
        self.read.args = (states,)
        for (quantizer, inverse), node in self.known.items():
            node.args = (self.read, (quantizer.place + inverse * len(states), 0))
        # In one order on all ranks, whichever groups each is in: none waits in one group for a rank that waits in another.
        for group in sorted(self.forward):
            with self.graph.inserting_before(self.graph.output_node()):
                update = self._update(group, self.slots.input.element)
                operands: Any = (self.forward[group].tensors, update, self.read)
                self.graph.call_function(ops.update_scales, operands, {"misfits": self._misfits(self.forward[group])})
        for group in sorted(self.backward):  # whose last step runs first
            update = self._update(group, self.slots.grad_output.element)
            self.steps[group].args = (self._leaf(), self.backward[group].tensors, update)  # type: ignore[assignment]
            self.steps[group].kwargs = {"misfits": self._misfits(self.backward[group])}
            self.steps_begin.append(self.steps[group])
        if self.without_group:
            agreement.note_no_group(self.without_group, self.inputs.fallback)

    def _misfits(self, updates: _ScaleUpdates) -> fx.Node | None:
        """An input in which an update counts the scales that did not suit; None without a guard."""
        if self.inputs.guard == "off":
            return None
        self.inputs.updated.append(updates.states)
        state: torch.Tensor = value(updates.tensors[0])
        return self._input(state.new_empty((len(updates.states), COUNTS), dtype=torch.int32))

    def _update(self, group: AmaxGroup, element: str) -> ScaleUpdate:
        heals = self.inputs.heals
        if not group:
            return ScaleUpdate(self.recipe, element, heals=heals)
        if group in self.in_step:
            return ScaleUpdate(self.recipe, element, group.names, heals=heals)
        updates = [one[group] for one in (self.forward, self.backward) if group in one]
        if self.groups.wait([state.readers[0] for one in updates for state in one.states]):
            self.inputs.waits = True
            return ScaleUpdate(self.recipe, element, heals=heals, waits=True)
        sites = [one[group].sites if group in one else [] for one in (self.forward, self.backward)]
        agreed = agreement.agreement_of(group, [repr(self.recipe.key()), *sites, *(["heal"] if heals else [])])
        if agreed not in self.inputs.agreements:
            self.inputs.agreements.append(agreed)
            agreement.announce(agreed)
        return ScaleUpdate(self.recipe, element, group.names, agreed.name, heals)

    def _step(self, group: AmaxGroup) -> fx.Node:
        """The backward's, of a group."""
        if group not in self.steps:
            with self.graph.inserting_after(self.steps_begin):
                self.steps[group] = self.graph.call_function(ops.delayed_step, ())
        return self.steps[group]

    def _reader(self, match: Match, weight: fx.Node, slot: str) -> StateReader:
        owner = owner_of(weight, self.bodies)
        assert owner is not None  # `refusal` otherwise
        node = owner.parameter
        site = StateSite(self.paths[match.node], holder_path(node), owner.part, slot)
        key = Key(weight_site(owner.part) if slot == "weight" else site, self.recipe)
        if node.op == "get_attr":
            return StateReader(str(node.target), key)
        return StateReader(self.bodies.place_of(node), key)

    def _quantizer(self, match: Match, weight: fx.Node, slot: str) -> _Quantizer:
        reader = self._reader(match, weight, slot)
        readers = self.shared.get(reader, [reader])
        if readers[0] not in self.quantizers:
            state = StateInput(readers, self.paths[match.node], len(self.inputs.quantizers))
            self.inputs.quantizers.append(state)
            example = value(match.x)
            with compat.shard_of(example).fake_mode:  # type: ignore[attr-defined]
                tensor = torch.empty(self.recipe.amax_history_len + 1, dtype=torch.float32, device=example.device)
            group, place = self.groups.of(readers[0]), len(self.quantizers)
            self.quantizers[readers[0]] = _Quantizer(state, place, self._input(tensor), group)
        return self.quantizers[readers[0]]

    def _input(self, example: torch.Tensor) -> fx.Node:
        return append_input(self.graph, self.inputs, example)

    def _known(self, quantizer: _Quantizer, graph: fx.Graph) -> list[fx.Node]:
        """Its scale in this step and its reciprocal."""
        for inverse in (False, True):
            if (quantizer, inverse) not in self.known:
                with self.graph.inserting_after(self.read):
                    self.known[quantizer, inverse] = self.graph.call_function(operator.getitem, (self.read, 0))
        return [self.bodies.hand(self.known[quantizer, inverse], graph) for inverse in (False, True)]

    def _add(self, groups: _Groups, quantizer: _Quantizer) -> None:
        """Adds a quantizer once: a module called twice has one."""
        quantizer.state.recorded = True
        step = groups.setdefault(quantizer.group or OWN, _ScaleUpdates())
        if quantizer.tensor not in step.tensors:
            step.tensors.append(quantizer.tensor)
            step.states.append(quantizer.state)
            if quantizer.group is None:
                self.without_group.append(quantizer.state.site)

    def _record(self, quantizer: _Quantizer, pieces: Sequence[fx.Node], match: Match) -> None:
        """Record a tensor's amax, once however many sites read the same values of it. The sites come last first."""
        self._add(self.forward, quantizer)
        some = [one for one in pieces if not (is_tensor(one) and is_empty(value(one)))]  # parts of parameters are ours
        new = [one for one in some if self._is_new(quantizer, one, match.node)]
        if new:
            graph = new[0].graph
            if match.parallel is not None:
                graph.call_function(ops.record_shard_amax, (new, self.bodies.hand(quantizer.tensor, graph)))
                return
            # It is flattened as by `ops.layers`, so that the amax and the cast are seen to read the same tensor.
            flat = [graph.call_function(torch.ops.aten.reshape.default, (piece, [-1, match.sizes[2]])) for piece in new]
            graph.call_function(ops.record_amax, (flat, self.bodies.hand(quantizer.tensor, graph)))

    def _is_new(self, quantizer: _Quantizer, tensor: fx.Node, site: fx.Node) -> bool:
        """Whether nothing records what a site reads of a tensor yet. The amax of what is written in between is another."""
        behind = self.recorded.get((quantizer, tensor))
        self.recorded[quantizer, tensor] = site
        return behind is None or self.writes.between([tensor], site, behind)

    def _record_gathered(self, quantizer: _Quantizer, match: Match) -> None:
        """Record the amax of this rank's rows of a weight that is gathered in low precision."""
        self._add(self.forward, quantizer)
        gather, graph = match.gather, match.node.graph
        assert gather is not None  # it is gathered
        if self._is_new(quantizer, gather.shard, match.node):
            args = (gather.shard, gather.dtype, self.bodies.hand(quantizer.tensor, graph))
            graph.call_function(ops.record_weight_amax, args)

    def _leaf(self) -> fx.Node:
        """Any input that requires a gradient; a site in training implies one. A graph that may be frozen holds its
        parameters, each in front of its first reader: such a node is moved to the graph's begin, where this is read."""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr") and is_tensor(node) and value(node).requires_grad:
                if node.op == "get_attr":
                    self.graph.find_nodes(op="placeholder")[-1].append(node)
                return node  # type: ignore[no-any-return]
        raise RuntimeError("no input of the graph requires a gradient, though a site does")
