"""The state of delayed scaling as inputs of a compiled graph.

Dynamo compiles a module's code, not a module: its parameters are inputs of the graph, and another module of the same
class runs the same graph. So the state is an input too, found by the parameters that a call brings."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor import compat
from te_inductor.diagnostics import (
    COMPUTED_AGAIN,
    GUARD_RESIZED,
    guard_casts,
    guard_kept_out,
    guard_moved,
    guard_stays,
    log,
    misfitting,
    moved_elsewhere,
    say,
    without_amaxes,
    without_state,
)
from te_inductor.distributed import agreement
from te_inductor.distributed.agreement import Agreement
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.distributed.decisions import FormChoice, all_interpret, choice_of, interpret_none
from te_inductor.recipes.delayed import suitable
from te_inductor.recipes.formats import Element
from te_inductor.runtime.extra_inputs import ExtraInputs, GraphCall
from te_inductor.runtime.state import misfits, resumed
from te_inductor.runtime.state.misfits import MOST_GRAPHS, Misfits, Watch, are_unsuited, has_room, watch_of
from te_inductor.runtime.state.store import (
    LOCK,
    Key,
    QuantizerState,
    has_history,
    move,
    moves,
    note_history,
    recipe_behind,
    shared_state,
    take_from_shards,
)
from te_inductor.tensor_tables import TensorGroups, TensorTable

MANY_CALLS = 256  # in which some amax should have been recorded, whatever the number of microbatches in flight
FEW_CALLS = 8  # without generated code
_HARM = "scales that do harm"  # a kind of warning
# The checkpoints in whose forward some quantizer had no history, by a graph's first parameter: their backward may run
# another graph of the same code, as where first steps have generated code by then.
_first_in: TensorTable[WeakSet[Any]] = TensorTable()
_first_steps_recur = False  # whether some graph had more than that


class StateReader(NamedTuple):
    """A place in a graph that casts a tensor, by the parameter that its state is kept with."""

    parameter: int | str  # its place among the graph's inputs, or its name where the graph holds it
    key: Key


@dataclass
class StateInput:
    """One quantizer of a graph. All its readers share its state."""

    readers: Sequence[StateReader]
    site: str  # module path, for messages
    place: int  # which of the graph's quantizers it is
    recorded: bool = False  # whether the graph gives it new scales
    alike: bool = False  # whether its layers exchange tensors with other ranks, which have equal state


@dataclass
class _FoundStates:
    """The state that the calls with one set of parameters take."""

    moves: int
    tensors: list[Tensor]
    states: list[QuantizerState]
    recorded: list[QuantizerState]  # those of them that the graph gives new scales
    said: bool
    is_first: bool  # whether some of them have no history: Note [A first step]
    # Checkpoints in whose forward that was so: what they compute again has to be what it was.
    checkpoints: WeakSet[Any]
    choice: FormChoice | None  # with other ranks: Note [Ranks that choose]
    loads: int  # how often state was loaded
    watch: Watch

    def step(self, records: bool) -> None:
        """A call begins. What has no history is asked for it where a call that may have given it some lies behind. Until
        it has some, however long that takes, it scales by its own amax: with no other scale does nothing vanish."""
        unknown = [state for state in self.states if not state.has_history]
        if any(state.is_due for state in unknown) and not _is_capturing():
            note_history(unknown)
        self.is_first = not all(state.has_history for state in unknown)
        for state in self.recorded if records else ():
            state.recordings += 1


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _computed_again() -> Any:
    """The checkpoint without reentry whose backward makes this call, which has to be what the call before was; None
    elsewhere. With reentry the first run, without gradients, recorded nothing and left the scales as they were."""
    if torch._C._current_graph_task_id() < 0:
        return None
    checkpoint, again = compat.checkpoint_of_call()
    return checkpoint if again else None


@dataclass
class StateInputs(ExtraInputs):
    """All quantizers of a graph, in the order of its state inputs, one of each; behind them what counts misfits."""

    prefix: ClassVar[str] = "te_state_"
    fallback: str  # options["fallback"]
    guard: str = "warn"  # options["guard"]
    held: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that the graph holds
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input
    quantizers: list[StateInput] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)  # those without which it does not reduce amaxes
    exchanging: list[StateReader] = field(default_factory=list)  # of layers that exchange tensors with other ranks
    groups: set[AmaxGroup] = field(default_factory=set)  # of these ranks
    updated: list[list[StateInput]] = field(default_factory=list)  # the quantizers of each update, which counts misfits
    stays: str = ""  # why a guard can move none of its layers
    waits: bool = False  # whether a later graph updates the scales: Note [Microbatches]
    first_calls: int = 0  # first steps for which no code was generated
    _found: TensorGroups[_FoundStates] = field(default_factory=TensorGroups)  # by the parameters
    _said_again: bool = False
    _interprets: bool = True  # whether all ranks with which it exchanges tensors do

    def tensors(self, call: GraphCall) -> list[Tensor]:
        """The state of each quantizer; notes on the call whether some have no history."""
        inputs = call.inputs
        again = _computed_again()
        if again is not None:
            self._note_checkpoint()
        parameters = [inputs[place] for place in self._places] or list(self.held.values())
        reducing = bool(self.agreements) and not isinstance(parameters[0], FakeTensor)
        agreed = agreement.settle(self.agreements, self.fallback, parameters) if reducing else ()
        with LOCK:
            found = self._found_of(parameters, inputs)
            if found.is_first and again is None:
                found.step(records=not self.waits)
            is_first = found.is_first if again is None else again in found.checkpoints
        for order, one in agreed:
            call.behind.append(order.note(parameters, one.name, found.loads))
        if again is None:
            guarded = self._guards(found, inputs)
            if found.choice is None:
                is_first = is_first or guarded
            elif not _is_capturing():
                is_first = found.choice.of_call(is_first, found.loads, functools.partial(self._digest, found))
            if is_first and (checkpoint := compat.checkpoint_of_call()[0]) is not None:
                found.checkpoints.add(checkpoint)
            if found.is_first:
                self._note_no_history(found)
        call.states, call.is_first_step = found.states, is_first
        if compat.in_metadata_inference():  # whose amaxes are those of nothing
            return [tensor.clone() for tensor in found.tensors]
        return found.tensors

    def withdraw(self) -> None:
        """Let no other rank wait for the graph."""
        for one in self.agreements:
            agreement.withdraw(one)
        if self.exchanging:
            interpret_none(self._layers, self.groups)

    def _found_of(self, parameters: Sequence[Tensor], inputs: Sequence[Any]) -> _FoundStates:
        found = self._found.get(parameters)
        if found is None or found.moves != moves():
            take_from_shards()
            states = self._states(inputs)  # which may move some
            tensors = [one.tensor for one in states]
            is_first = not states[0].is_fake
            if is_first:
                note_history([state for state in states if not state.has_history])
            recorded = [(q, state) for q, state in zip(self.quantizers, states, strict=True) if q.recorded]
            for q, state in recorded if is_first and self.fallback != "silent" else ():
                for reader in q.readers if not state.has_history else ():
                    resumed.note_new(self._parameter(reader, inputs), q.site)
            late = [q for q, state in zip(self.quantizers, states, strict=True) if state.moved]
            if late and not (self.heals and not self.stays):
                say(moved_elsewhere([q.site for q in late], self._recipes_behind(late, inputs)), self.fallback)
            said, checkpoints = found is not None and found.said, _first_in.setdefault(parameters[0], WeakSet())
            choice, loads = self._choice(inputs), sum(state.loads for state in states)
            watch = self._watch(states, inputs)
            tensors += watch.counts
            of_step = [state for _, state in recorded]
            found = _FoundStates(moves(), tensors, states, of_step, said, is_first, checkpoints, choice, loads, watch)
            self._found.set(parameters, found)
        return found

    def _note_no_history(self, found: _FoundStates) -> None:
        """Say that the graph casts by own amaxes: once a model where it has done so for many calls, and at the first
        call, or as an error at each, where it records nothing, so that it always will."""
        comes_again = not found.recorded and compat.in_reentrant_forward()  # in the backward, which records amaxes
        if comes_again or (found.said and (found.recorded or self.fallback != "error")):
            return
        pairs = zip(self.quantizers, found.states, strict=True)
        lacking = [(q.site, state) for q, state in pairs if not state.has_history]
        sites, calls = [site for site, _ in lacking], max(state.recordings for _, state in lacking)
        found.said = not found.recorded or calls >= MANY_CALLS
        if not found.recorded:
            say(without_state(sites), self.fallback)
        elif found.said:
            say(without_amaxes(sites, calls), "warn" if self.fallback == "error" else self.fallback)

    def _note_checkpoint(self) -> None:
        """Say that a checkpoint without reentry runs the graph again."""
        if self.fallback == "error" or not self._said_again:
            self._said_again = True
            say(COMPUTED_AGAIN, self.fallback)

    def _watch(self, states: Sequence[QuantizerState], inputs: Sequence[Any]) -> Watch:
        """What counts the misfits of each update."""
        updated = [[states[q.place] for q in update] for update in self.updated]
        if not updated or updated[0][0].is_fake:
            pairs = zip(updated, self.examples[len(self.quantizers) :], strict=True)
            return Watch([update[0].scale.new_empty(one.shape, dtype=one.dtype) for update, one in pairs])
        names = [[repr(q.readers[0].key.site) for q in update] for update in self.updated]
        watch = watch_of(self._parameter(self.updated[0][0].readers[0], inputs), names, updated)
        watch.heals = watch.heals or self.heals
        if watch.heals and not watch.begun and not _is_capturing():
            watch.begin([suitable(element) for element in self._elements])
        if self.fallback != "silent":
            watch.names = [*zip(self._names, [element.max for element in self._elements], strict=True)]
        return watch

    @property
    def heals(self) -> bool:
        """Whether the guard does more than warn: Note [A guard that heals]."""
        return self.guard == "heal"

    def _guards(self, found: _FoundStates, inputs: Sequence[Any]) -> bool:
        """Looks at what the last steps have counted, where it is time. Whether the guard has this call cast by own
        amaxes."""
        watch = found.watch
        if not self.updated:  # what counts is a graph that trains
            return self.heals and not _is_capturing() and are_unsuited(found.states)
        if _is_capturing() or not (watch.heals or (watch.names and not misfits.is_said(_HARM))):
            return False
        counts = watch.look()
        if counts is not None:
            self._note_misfits(watch, counts)
        if not watch.heals or not watch.counts:
            return False
        if self.heals and not self.waits and (failing := watch.failing()):
            self._move(watch, failing, inputs)
        resized = watch.note_sizes(tuple([one.numel() for one in inputs if type(one) is Tensor]))
        if resized and misfits.say_once("resized"):
            log.warning("%s", GUARD_RESIZED)
        return resized or watch.is_unsuited

    def _note_misfits(self, watch: Watch, counts: Sequence[Misfits]) -> None:
        """Say once a process which scales did harm, as soon as the host knows; log what the guard does."""
        names = self._names
        if watch.heals:
            for text, places in zip((guard_kept_out, guard_casts), watch.note(counts), strict=True):
                if places:
                    log.warning("%s", text([names[place] for place in places]))
        if watch.names and any(one.first for one in counts) and misfits.say_once(_HARM):
            say(misfitting([*misfits.harm_of_all()]), "warn")  # no error: it is of what was run, not of how

    def _move(self, watch: Watch, failing: Sequence[int], inputs: Sequence[Any]) -> None:
        """Moves the layers of tensors that keep failing, or says once why not: Note [Layers that a guard moves]."""
        tensors = [self._names[place] for place in failing]
        states = [watch.states[place] for place in failing]
        stays = self.stays
        if self.exchanging:
            stays = "its graph exchanges tensors with other ranks"
        elif compat.checkpoint_of_call()[0] is not None:
            stays = "a checkpoint around the compiled module runs its forward again"
        elif any(state.moved for state in states):  # and this graph runs still
            stays = "Dynamo does not ask the guard that has its graph compiled anew"
        if not stays and has_room(self._names, tensors):
            move(states)
            quantizers = [*itertools.chain(*self.updated)]
            recipes = self._recipes_behind([quantizers[place] for place in failing], inputs)
            log.warning("%s", guard_moved(tensors, recipes))
        else:
            why = stays or f"{MOST_GRAPHS} graphs were compiled anew for others"
            if self.fallback != "silent" and misfits.say_once(why):
                say(guard_stays(tensors, why), "warn")

    def _recipes_behind(self, quantizers: Sequence[StateInput], inputs: Sequence[Any]) -> list[str]:
        """The recipes to which a guard moves the layers of quantizers."""
        readers = itertools.chain(*(q.readers for q in quantizers))
        return sorted({recipe_behind(self._parameter(reader, inputs)) for reader in readers})

    @functools.cached_property
    def _names(self) -> list[str]:
        """What messages call the quantizers that updates count."""
        return [f"{q.site or '(root)'}.{q.readers[0].key.site.slot}" for q in itertools.chain(*self.updated)]

    @functools.cached_property
    def _elements(self) -> list[Element]:
        """The elements of these quantizers."""
        keys = [q.readers[0].key for q in itertools.chain(*self.updated)]
        return [getattr(key.recipe.slots(), key.site.slot).format for key in keys]

    def _digest(self, found: _FoundStates) -> str:
        """What ranks that exchange tensors know their state by."""
        states = [found.states[q.place].tensor[1:] for q in self.quantizers if q.alike]
        digest = hashlib.sha256(torch.cat(states).cpu().numpy().tobytes() if states else b"")
        return digest.hexdigest()[:16]

    def _choice(self, inputs: Sequence[Any]) -> FormChoice | None:
        if not self.exchanging:
            return None
        lead = self._parameter(self._lead, inputs)
        return None if isinstance(lead, FakeTensor) else choice_of(lead, self._layers, self.groups)

    @functools.cached_property
    def _lead(self) -> StateReader:
        """One of the layers that exchange tensors, the same one in each graph of them."""
        layers = {repr(reader.key.site): reader for reader in self.exchanging}
        return layers[min(layers)]

    @functools.cached_property
    def _layers(self) -> str:
        """All of these layers."""
        return repr(sorted({repr(reader.key.site) for reader in self.exchanging}))

    @functools.cached_property
    def _places(self) -> list[int]:
        return sorted({place for q in self.quantizers for place, _ in q.readers if isinstance(place, int)})

    def may_lack_history(self, inputs: Sequence[Any]) -> bool:
        """Whether a call with these inputs, or a later one, may find a quantizer without history. Makes no state."""
        if _first_steps_recur or self.exchanging or self.heals:  # ranks run the same code, whatever each knows
            return True
        for reader in itertools.chain(*(q.readers for q in self.quantizers)):
            parameter = self._parameter(reader, inputs)
            if isinstance(parameter, FakeTensor) or not has_history(parameter, reader.key.recipe):
                return True
        return False

    def has_many_first_steps(self, inputs: Sequence[Any]) -> bool:
        """Whether first steps are worth generated code: where some graph had many, or a guard may ask for them at any
        time. Ranks that exchange tensors count those of their layers alike (Note [Ranks that interpret])."""
        if self.heals or not self.exchanging:
            return self.heals or _first_steps_recur
        choice = self._choice(inputs)
        self._interprets = choice is not None  # those of a model without storage are not counted
        return choice is None or choice.first_calls >= FEW_CALLS

    @property
    def agree(self) -> Callable[[bool], bool] | None:
        """Tells ranks that exchange tensors whether this one may interpret first steps, and returns whether all do."""
        return self._agree if self.exchanging else None

    def _agree(self, may: bool) -> bool:
        self._interprets = all_interpret(self._layers, self.groups, may)
        return self._interprets

    def count_first_steps(self, graph: fx.GraphModule, first: Callable[..., Any], many: bool) -> Callable[..., Any]:
        """What runs first steps. Where there are more than a few without code, Dynamo compiles the graph again, now with
        code for them. Of layers that exchange tensors, it asks which of the two graphs is the parameters'."""

        def counted(*inputs: Any) -> Any:
            global _first_steps_recur
            self.first_calls += 1
            _first_steps_recur = _first_steps_recur or self.first_calls >= FEW_CALLS
            return first(*inputs)

        def is_counted(parameter: Tensor) -> bool:
            return (choice_of(parameter, self._layers, self.groups).first_calls >= FEW_CALLS) == many

        together = bool(self.exchanging) and not self.heals
        if (many and not together) or not self._interprets or self.waits:  # all microbatches of one step are first
            return first
        for place in [self._lead.parameter] if together else self._places[:1]:
            if isinstance(place, int):
                node = graph.graph.find_nodes(op="placeholder")[place]
                holds = is_counted if together else lambda _: self.first_calls < FEW_CALLS
                compat.guard_on_tensor(node, holds, "te_inductor_has_few_first_steps")
        return first if together else counted

    def _parameter(self, reader: StateReader, inputs: Sequence[Any]) -> Tensor:
        place = reader.parameter
        return self.held[place] if isinstance(place, str) else inputs[place]

    def _states(self, inputs: Sequence[Any]) -> list[QuantizerState]:
        readers = [[(self._parameter(reader, inputs), reader.key) for reader in q.readers] for q in self.quantizers]
        of_graph: dict[int, set[Key]] = {}
        for parameter, key in itertools.chain(*readers):
            of_graph.setdefault(id(parameter), set()).add(key)
        return [shared_state(group, of_graph) for group in readers]
