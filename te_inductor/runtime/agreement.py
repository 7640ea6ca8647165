"""Whether all ranks reduce the amaxes of a graph together.

# Note [Ranks that agree]
A graph reduces its amaxes over ranks only where each rank runs a graph with the same quantizers, at the same time.
Otherwise ranks would take each other's values, or wait for each other for ever. Nobody knows beforehand: stages of a
pipeline have other layers, or equal ones that run one after another. So ranks ask before the first call of a graph, by
the key-value store of the default process group and not by a collective, which itself could wait for ever:

1. An agreement has a name, a digest of the recipe and of the graph's quantizers in order. A rank says that it compiles such
   a graph, and later that it has come to the first call, where it waits.
2. The last rank to come proposes yes. A rank that waits proposes no where another one waits at another name (for both
   names), where another one has not begun to compile within `PATIENCE`, or has begun and not come within
   `PATIENCE_OF_COMPILES`.
3. The first proposal wins, by one `compare_set`, so that all ranks read the same decision. It never changes: it is known
   before a CUDA graph is captured.

After a wait in vain this rank waits no more for ranks that have not begun. After a yes, ranks that do not call the
graph equally often wait for each other in the collective, as they would in those of DDP."""

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist

from te_inductor.diagnostics import amaxes_stay_local, say

PATIENCE = 60.0  # seconds; until another rank begins to compile the graph
PATIENCE_OF_COMPILES = 600.0  # seconds; until a rank that compiles the graph calls it
_PAUSE, _LOOK = 0.01, 0.2  # seconds; between looks at the decision, and at the other ranks
_YES = "yes"


@dataclass
class _World:
    """The ranks of a default process group."""

    store: Any
    rank: int
    size: int
    prefix: str  # of our keys in the store
    decisions: dict[str, str] = field(default_factory=dict)  # by name: `_YES`, or why not
    patient: bool = True
    said: bool = False


_worlds = 0
_world: _World | None = None
_LOCK = threading.Lock()  # a rank waits at one agreement at a time


def name_of(quantizers: object) -> str:
    """The same on each rank that has the same."""
    return hashlib.sha256(repr(quantizers).encode()).hexdigest()[:16]


def announce(name: str) -> None:
    """Tell the other ranks that this one compiles a graph, so that they wait for its first call."""
    world = _current()
    if world is not None:
        world.store.set(f"{world.prefix}/compiles/{name}/{world.rank}", "1")


def withdraw(name: str) -> None:
    """Tell the other ranks that this one does not come to a graph that it said it compiles."""
    world = _current()
    if world is not None:
        why_not = f"rank {world.rank} could not compile a graph in low precision"
        world.store.compare_set(f"{world.prefix}/decision/{name}", "", why_not)


def settle(names: Sequence[str], fallback: str) -> None:
    """Before a call of a graph: at the first one, decide with all ranks whether it reduces amaxes. Say so where it does
    not: once a process group, or as an error at each call.

    Raises:
        FallbackError: with ``fallback="error"``, where ranks do not agree.
    """
    world = _current()
    if world is None:
        return
    for name in names:
        if name not in world.decisions:
            with _LOCK:
                if name not in world.decisions:
                    world.decisions[name] = _decide(world, name)
        if world.decisions[name] != _YES and (fallback == "error" or not world.said):
            world.said = True
            say(amaxes_stay_local(world.decisions[name]), fallback)


def reached(name: str | None) -> bool:
    """Whether all ranks reduce together what has this name."""
    world = _current()
    return world is not None and name is not None and world.decisions.get(name) == _YES


def _current() -> _World | None:
    """None where there is one rank."""
    global _world, _worlds
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    world = _world
    if world is None or world.store is not store:
        with _LOCK:
            if _world is None or _world.store is not store:
                _worlds += 1  # a group that comes after another one may have its store's keys
                _world = _World(store, dist.get_rank(), dist.get_world_size(), f"te_inductor/{_worlds}")
            world = _world
    return world


def _decide(world: _World, name: str) -> str:
    """The decision of all ranks, after a wait that has an end."""
    if dist.get_backend() == "fake":  # one process plays all ranks
        return _YES
    store, prefix = world.store, world.prefix
    decision, waits = f"{prefix}/decision/{name}", f"{prefix}/waits/{world.rank}"
    store.set(waits, name)
    store.set(f"{prefix}/came/{name}/{world.rank}", "1")
    if store.add(f"{prefix}/count/{name}", 1) == world.size:
        store.compare_set(decision, "", _YES)
    started = looked = time.monotonic()
    while not store.check([decision]):
        now = time.monotonic()
        if now - looked > _LOOK:
            looked = now
            why_not = _why_not(world, name, now - started)
            if why_not is not None:
                store.compare_set(decision, "", why_not)
                continue
        time.sleep(_PAUSE)
    found: str = store.get(decision).decode()
    store.set(waits, "")
    return found


def _why_not(world: _World, name: str, waited: float) -> str | None:
    """Why this rank does not wait any longer; None as long as it does."""
    store, prefix = world.store, world.prefix
    for rank in range(world.size):
        if store.check([f"{prefix}/came/{name}/{rank}"]):
            continue
        key = f"{prefix}/waits/{rank}"
        other = store.get(key).decode() if store.check([key]) else ""
        # Undecided: else that rank goes on, and its entry is an old one.
        if other not in ("", name) and not store.check([f"{prefix}/decision/{other}"]):
            why_not = f"ranks {world.rank} and {rank} run graphs with different quantizers at the same time"
            store.compare_set(f"{prefix}/decision/{other}", "", why_not)  # each would wait for the other
            return why_not
        begun = store.check([f"{prefix}/compiles/{name}/{rank}"])
        patience = PATIENCE_OF_COMPILES if begun else PATIENCE if world.patient else 0.0
        if waited > patience:
            world.patient = False
            return f"rank {rank} did not come to a graph with the same quantizers, for which rank {world.rank} waited"
    return None
