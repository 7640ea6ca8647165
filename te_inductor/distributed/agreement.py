"""Whether all ranks of a group reduce the amaxes of a graph together.

# Note [Ranks that agree]
A graph reduces its amaxes over a group's ranks only where each of them runs a graph with the same quantizers, at the same
time. Otherwise ranks would take each other's values, or wait for each other for ever. Nobody knows beforehand: ranks may
run other layers, or equal ones one after another. So ranks ask before the first call of a graph, by the key-value store
of the default process group and not by a collective, which itself could wait for ever:

1. An agreement has a name, a digest of the group, the recipe and the quantizers in order. A rank says that it compiles
   such a graph, and later that it has come to the first call, where it waits.
2. The last rank of the group to come proposes yes. A rank that waits proposes no where ranks wait for each other in a
   ring (for all names on it), where another one has not begun to compile within `PATIENCE`, or has begun and not come
   within `PATIENCE_OF_COMPILES`.
3. The first proposal wins, by one `compare_set`, so that all ranks read the same decision. It never changes: it is known
   before a CUDA graph is captured.

After a wait in vain this rank waits no more for ranks that have not begun. After a yes, ranks that do not call the
graph equally often, or call several graphs, or their backwards, in another order than each other, would take the amaxes
of other layers, or a gradient for amaxes. So each rank keeps the list of its reductions: `CallOrder`. Where one follows
another for the first time, the rank waits for the others before it makes it: all make this step for the first time
here, as equal lists have equal first times, or one has gone on to another. That one may wait in a collective by now, so
that a thread of its own tells which it was: `Answers`. It also says which ranks stand behind fewer calls than this one,
as they run a step without the backend or leave out a backward. A step that is known costs nothing; for those a rank
compares its list with that of the first rank to come as far, behind each of the first reductions, then behind ever more
of them, 64 at most. The list also says how often state was loaded, which one rank must not do alone.

After a yes a rank may also come to train the same layers, by their parameters, in a graph with other quantizers, or with
none: behind a graph break, in another branch or region. All ranks do so, or this one raises, as another one waits for it
in the reduction of before: `settle`, and `leave` for a graph that reduces none of their amaxes.

In a DistributedDataParallel a layer has one name on all ranks. Elsewhere its place in the order is its name, which says
nothing of the first calls; so a rank also tells some of the parameter's values, by a digest. Where another rank has met
these values in another place, the order differs. Where it never meets them ranks hold other parameters, as by hand
written tensor parallelism has them, and nothing is said.

Nor may a rank leave the others alone where it compiles a layer anew, for a batch of another size: a last one, which is
smaller, or empty. What is decided by the number of rows, on one rank alone, would have it reduce other amaxes than they
do. So where ranks have agreed about a graph, its layers stay in the precision that they have there: `form_of`."""

import json
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_inductor.diagnostics import amaxes_have_no_group, amaxes_stay_local, say
from te_inductor.distributed import amax_groups
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.distributed.call_order import Answers, CallOrder
from te_inductor.distributed.world import World, current, digest
from te_inductor.errors import StateError

PATIENCE = 60.0  # seconds; until another rank begins to compile the graph
PATIENCE_OF_ANSWERS = 3.0  # seconds; until a rank that reduces amaxes of another graph by then is asked about
PATIENCE_OF_COMPILES = 600.0  # seconds; until a rank that compiles the graph calls it
_PAUSE, _LOOK = 0.01, 0.2  # seconds; between looks at the decision, and at the other ranks
_YES = "yes"
_ABSENT = "did not come to a graph with the same quantizers"


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a group have to agree on before a graph reduces amaxes over them."""

    name: str
    group: AmaxGroup


_LOCK = threading.Lock()  # a rank waits at one agreement at a time


def agreement_of(group: AmaxGroup, quantizers: object) -> Agreement:
    """The same on each of the group's ranks that has the same quantizers. In a mesh of several dimensions the process
    groups have other names on other ranks."""
    return Agreement(digest((*_known_as(group), quantizers)), group)


def _known_as(group: AmaxGroup) -> tuple[Any, ...]:
    """What all of its ranks know a group by."""
    return group.names if len(group.names) == 1 else len(group.names), group.ranks


def _order(world: World, group: AmaxGroup) -> CallOrder:
    """The order of calls that reduce amaxes over a group."""
    if group not in world.orders:
        world.orders[group] = CallOrder(world, digest(_known_as(group)), group.ranks)
        world.answers = world.answers or Answers(world)
    return world.orders[group]


def announce(agreement: Agreement) -> None:
    """Tell the other ranks that this one compiles a graph, so that they wait for its first call."""
    world = current()
    if world is not None and not world.is_fake:
        world.set(f"compiles/{agreement.name}/{world.rank}", "1")


def withdraw(agreement: Agreement) -> None:
    """Tell the other ranks that this one does not come to a graph that it said it compiles."""
    world = current()
    if world is not None and not world.is_fake:
        world.propose(f"decision/{agreement.name}", f"rank {world.rank} could not compile a graph in low precision")


def note_no_group(fqns: Sequence[str], fallback: str) -> None:
    """Say once a process group that these sites reduce amaxes over no ranks, as nothing tells over which. No error: it
    is the default."""
    world = current()
    if world is not None and not world.said_no_group:
        world.said_no_group = True
        say(amaxes_have_no_group(fqns), "warn" if fallback == "error" else fallback)


def settle(
    agreements: Sequence[Agreement], fallback: str, parameters: Sequence[Tensor]
) -> list[tuple[CallOrder, Agreement]]:
    """Is called before each call of a graph: at the first one, decides with all ranks of each group whether it reduces
    amaxes. Say so where it does not: once a process group, or as an error at each call. Returns the agreements of those
    groups over which it does, with the order of such calls.

    Args:
        parameters: of all layers of the graph.

    Raises:
        FallbackError: with ``fallback="error"``, where ranks do not agree.
        StateError: a process group is gone since the graph was compiled; or ranks reduce amaxes of these layers in
            another graph, and some of them did not come to this one.
    """
    world = current()
    if world is None:
        raise StateError(amax_groups.gone(agreements[0].group.names[0]))
    for agreement in agreements:
        decision = _decision(world, agreement, parameters)
        if decision != _YES and (fallback == "error" or not world.said):
            world.said = True
            say(amaxes_stay_local(decision), fallback)
    agreed = [one for one in agreements if world.decisions[one.name] == _YES and not world.is_fake]
    return [(_order(world, one.group), one) for one in agreed]


def _decision(world: World, agreement: Agreement, parameters: Sequence[Tensor]) -> str:
    """What all ranks have decided about a graph of layers with these parameters, or decide now.

    Raises:
        StateError: they reduce amaxes of the same layers in another graph, and some of them did not come to this one.
    """
    name = agreement.name
    if name not in world.decisions:
        for group in agreement.group.names:
            amax_groups.process_group(group)
        with _LOCK:
            if name not in world.decisions:
                world.decisions[name] = _decide(world, agreement, _are_reduced(world, parameters))
    decision = world.decisions[name]
    if _ABSENT in decision and _are_reduced(world, parameters):
        raise StateError(otherwise(world.rank, decision))
    return decision


def _are_reduced(world: World, parameters: Sequence[Tensor]) -> bool:
    """Whether ranks reduce amaxes of some of the layers with these parameters."""
    return any(order.reduces(one) for order in world.orders.values() for one in parameters)


def leave(layers: Mapping[str, Tensor]) -> None:
    """Is called where a graph trains layers and reduces none of their amaxes, with their parameters by what all ranks call
    them: has those ranks come to this that reduce them in another graph.

    Raises:
        StateError: some of them did not come.
    """
    world = current()
    for group, order in sorted(world.orders.items()) if world is not None else ():
        names = sorted(name for name, parameter in layers.items() if order.reduces(parameter))
        if names:
            _decision(world, agreement_of(group, ["left", *names]), [*layers.values()])  # type: ignore[arg-type]


def note_forms(agreements: Sequence[Agreement], layers: Iterable[tuple[Hashable, bool]]) -> None:
    """Note which layers of a graph run in low precision, all of whose ranks may agree on these."""
    world = current()
    for layer, low in layers if world is not None else ():
        if form_of(layer) is None:
            world.forms[layer] = low, agreements  # type: ignore[union-attr]


def form_of(layer: Hashable) -> bool | None:
    """Whether a layer runs in low precision on the ranks that reduce amaxes with this one; None where none do."""
    world = current()
    low, agreements = (False, ()) if world is None else world.forms.get(layer, (False, ()))
    return low if any(reached(one.name) for one in agreements) else None


def otherwise(rank: int, decision: str) -> str:
    """The text of the error about a graph that this rank does not run as all ranks have run its layers."""
    return (
        f"rank {rank} runs layers whose amaxes of delayed scaling it has reduced with other ranks in another graph than"
        f" these do ({decision}), expected one graph, recipe and policy on all of these ranks; have them take the same"
        " branch, put forwards that others do not run under torch.no_grad(), or pass options={'amax_group': 'none'}"
    )


def reached(name: str | None) -> bool:
    """Whether all ranks reduce together what has this name."""
    world = current()
    return world is not None and name is not None and world.decisions.get(name) == _YES


def _decide(world: World, agreement: Agreement, late: bool) -> str:
    """The decision of all ranks, after a wait that has an end; `late`: they reduce amaxes of its layers already."""
    if world.is_fake:
        return _YES
    name = agreement.name
    _come(world, agreement)
    world.set(f"waits/{world.rank}", name)
    started = looked = time.monotonic()
    while not world.has(f"decision/{name}"):
        now = time.monotonic()
        if now - looked > _LOOK:
            looked = now
            why_not = _why_not(world, agreement, now - started, late)
            if why_not is not None:
                world.propose(f"decision/{name}", why_not)
                continue
        time.sleep(_PAUSE)
    found = world.get(f"decision/{name}")
    world.set(f"waits/{world.rank}", "")
    return found


def _come(world: World, agreement: Agreement) -> None:
    """Tell the others that this rank has come."""
    name, ranks = agreement.name, agreement.group.ranks
    if not world.has(f"came/{name}/{world.rank}"):
        world.set(f"ranks/{name}", json.dumps(ranks))
        world.set(f"came/{name}/{world.rank}", "1")
        if world.count(f"count/{name}") == len(ranks):
            world.propose(f"decision/{name}", _YES)


def together(agreements: Sequence[Agreement]) -> str:
    """Has all ranks come to what is new, in one graph or in several, of which the first is waited for. Returns why one of
    them did not; empty where all did."""
    world = current()
    if world is None or world.is_fake:
        return ""
    for one in agreements:
        _come(world, one)
    with _LOCK:
        decision = _decide(world, agreements[0], late=True)
    return "" if decision == _YES else decision


def _why_not(world: World, agreement: Agreement, waited: float, late: bool) -> str | None:
    """Why this rank does not wait any longer; None as long as it does."""
    name = agreement.name
    for rank in agreement.group.ranks:
        if world.has(f"came/{name}/{rank}"):
            continue
        ring = _ring(world, [(world.rank, name)], rank)
        if ring:
            why_not = f"ranks {world.rank} and {rank} run graphs with different quantizers at the same time"
            for _, other in ring:  # each would wait for the next
                world.propose(f"decision/{other}", why_not)
            return why_not
        begun, order = world.has(f"compiles/{name}/{rank}"), world.orders.get(agreement.group)
        patience = PATIENCE_OF_COMPILES if begun else PATIENCE if world.patient or late else 0.0
        asks = order if late and waited > PATIENCE_OF_ANSWERS else None
        if waited > patience or (asks is not None and any(asks.gone_on(asks.made, [rank]))):
            world.patient = world.patient and late
            return f"rank {rank} {_ABSENT}, for which rank {world.rank} waited"
    return None


_Waits = tuple[int, str]  # a rank, and the name at which it waits


def _ring(world: World, path: list[_Waits], rank: int) -> list[_Waits]:
    """Ranks that wait for each other in a ring: those of a path, of which each waits for the next and the last one for
    `rank`, and that one, if it waits for the first, perhaps by way of others. Empty where there is no ring."""
    name = world.get(f"waits/{rank}")
    if not name or rank in [other for other, _ in path]:
        return []
    path = [*path, (rank, name)]
    for other in json.loads(world.get(f"ranks/{name}")):
        if not world.has(f"came/{name}/{other}"):
            ring = (path if _is_standing(world, path) else []) if other == path[0][0] else _ring(world, path, other)
            if ring:
                return ring
    return []


def _is_standing(world: World, ring: list[_Waits]) -> bool:
    """Whether all of its ranks wait now. Nothing here becomes true again, so each did when the last entry was read:
    an undecided one is no old entry, and a rank that has not come cannot have gone on."""
    following = [*ring[1:], ring[0]]
    return all(
        not world.has(f"decision/{name}") and not world.has(f"came/{name}/{after}")
        for (_, name), (after, _) in zip(ring, following, strict=True)
    )
