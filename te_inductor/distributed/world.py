"""What a rank knows under one default process group, and what ranks tell each other by its key-value store: not by a
collective, in which one could wait for ever for ranks that run other code.

Whatever ranks have to be alike in is a topic of `exchanged`: each leaves a text, and reads those of the others where they
differ."""

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from te_inductor.diagnostics import say
from te_inductor.distributed import amax_groups
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.errors import StateError

if TYPE_CHECKING:
    from te_inductor.distributed.agreement import Agreement
    from te_inductor.distributed.call_order import Answers, CallOrder

_PAUSE = 0.01  # seconds between looks at whether all ranks have come


@dataclass
class World:
    """What this rank knows under one default process group."""

    reference: weakref.ref[Any]  # to its store, whose server ends with the group, so that another may have its address
    rank: int
    prefix: str  # of our keys in the store
    is_fake: bool = False  # one process plays all ranks, and its store may hold nothing
    decisions: dict[str, str] = field(default_factory=dict)  # by an agreement's name: yes, or why not
    patient: bool = True
    compiles: dict[str, int] = field(default_factory=dict)  # how often, of layers that exchange tensors
    told: dict[str, int] = field(default_factory=dict)  # how often this rank has told the others, by ranks and topic
    # Whether ranks interpret first steps, by layers and the ranks of their groups: Note [Ranks that interpret].
    interpreted: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    # Whether layers run in low precision in a graph, and the agreements of that.
    forms: dict[Hashable, tuple[bool, Sequence["Agreement"]]] = field(default_factory=dict)
    orders: dict[AmaxGroup, "CallOrder"] = field(default_factory=dict)
    answers: "Answers | None" = None
    said: bool = False  # that ranks did not agree
    said_no_group: bool = False

    @property
    def store(self) -> Any:
        found = self.reference()
        if found is None:
            raise StateError(amax_groups.gone("default"))
        return found

    def has(self, key: str) -> bool:
        return bool(self.store.check([f"{self.prefix}/{key}"]))

    def get(self, key: str) -> str:
        """Empty where there is no such key."""
        return self.store.get(f"{self.prefix}/{key}").decode() if self.has(key) else ""

    def set(self, key: str, value: str) -> None:
        self.store.set(f"{self.prefix}/{key}", value)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")

    def count(self, key: str) -> int:
        """How often a key was counted by any rank, this time included."""
        return int(self.store.add(f"{self.prefix}/{key}", 1))

    @property
    def timeout(self) -> float:
        return self.store.timeout.total_seconds()  # type: ignore[no-any-return]

    def propose(self, key: str, value: str) -> bytes:
        """What the first rank left at a key, perhaps this one now."""
        return self.store.compare_set(f"{self.prefix}/{key}", "", value)  # type: ignore[no-any-return]

    def first(self, key: str, value: str) -> tuple[int, list[str]]:
        """The same of JSON: the rank's number, and the rest."""
        rank, *rest = json.loads(self.propose(key, value))
        return rank, rest


_world: World | None = None
_LOCK = threading.Lock()


def current() -> World | None:
    """None where there is one rank."""
    global _world
    if not amax_groups.several_ranks():
        return None
    store = dist.distributed_c10d._get_default_store()
    world = _world
    if world is None or world.reference() is not store:
        with _LOCK:
            if _world is None or _world.reference() is not store:
                _world = _new_world(store, dist.get_rank(), dist.get_backend() == "fake")
            world = _world
    return world


def _new_world(store: Any, rank: int, is_fake: bool) -> World:
    """Makes keys that no group before it has in the same store. Ranks may have been in other numbers of groups, as where
    one has taken the place of another that died: so the store counts."""
    groups = 0 if is_fake else store.add(f"te_inductor/groups/{rank}", 1)
    return World(weakref.ref(store), rank, f"te_inductor/{groups}", is_fake)


def tell(world: World, ranks: Sequence[int], topic: str, own: str) -> tuple[str, str]:
    """Leaves this rank's text where `exchanged` does, without waiting for the others. Returns the key of all texts, and
    that of the texts of the time before."""
    topic = f"exchanged/{topic}/{'-'.join(map(str, ranks))}"
    world.told[topic] = count = world.told.get(topic, 0) + 1
    key, before = f"{topic}/{count}", f"{topic}/{count - 1}"
    world.set(f"{key}/{world.rank}", own)
    if world.propose(f"{key}/first", own).decode() != own:
        world.set(f"{key}/differ", "1")
    if world.count(f"{key}/count") == len(ranks):
        world.set(f"{key}/all", "1")
        world.delete(*(f"{before}/{name}" for name in ("first", "differ", "count", "all")))
    return key, before


def exchanged(
    ranks: Sequence[int],
    topic: str,
    own: str,
    alone: Callable[[int, Sequence[int], float], StateError],
    patience: float,
) -> set[str]:
    """The different texts that ranks have for each other, this one's among them. All of them have to come here, equally
    often for a topic, and each waits for the others, on the host.

    Args:
        own: what this rank says, not empty.
        alone: the error about ranks that do not come, of this rank's number, theirs, and the seconds that it has waited.
        patience: the seconds behind which its text is a warning.

    Raises:
        StateError: one did not come before the store's timeout, which is that of the default process group.
    """
    world = current()
    if world is None or world.is_fake or len(ranks) == 1:
        return {own}
    key, before = tell(world, ranks, topic, own)
    started, limit = time.monotonic(), min(patience, world.timeout)
    while not world.has(f"{key}/all"):
        waited = time.monotonic() - started
        if waited > limit:
            error = alone(world.rank, [rank for rank in ranks if not world.has(f"{key}/{rank}")], waited)
            if limit == world.timeout:
                raise error
            say(str(error), "warn")
            limit = world.timeout
        time.sleep(_PAUSE)
    world.delete(f"{before}/{world.rank}")  # which all ranks have read, as they have come here
    return {own, *(world.get(f"{key}/{rank}") for rank in ranks if world.has(f"{key}/differ"))}


def digest(known: object) -> str:
    """A short text for what ranks have alike, or not."""
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]
