"""Answers to ranks that wait for this one, by a thread, as its own may wait for them in a collective."""

import atexit
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from te_inductor.distributed.call_order import CallOrder
from te_inductor.errors import StateError

STANDSTILL = 1.0  # seconds without a call, behind which a rank looks whether another one asks


class _HasOrders(Protocol):
    """What this rank knows under one default process group."""

    @property
    def orders(self) -> Mapping[Any, CallOrder]: ...


class Answers:
    """A thread that tells other ranks which calls this one has made while it makes no others. It ends with the process
    group, and in front of the interpreter, whose end no call of a store would survive."""

    def __init__(self, world: _HasOrders) -> None:
        self._world, self._ends = weakref.ref(world), threading.Event()
        self._thread = threading.Thread(target=self._run, name="te_inductor answers", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        self._ends.set()
        self._thread.join(2 * STANDSTILL)

    def _run(self) -> None:
        made: dict[str, int] = {}
        while not self._ends.wait(STANDSTILL) and self._answer(made):
            pass
        atexit.unregister(self._end)

    def _answer(self, made: dict[str, int]) -> bool:
        """Whether there may be more to answer; `made` has the numbers of calls that were made before."""
        world = self._world()
        if world is None:
            return False
        for order in list(world.orders.values()):
            if made.get(order.key) == order.made:
                try:
                    order.answer()
                except (RuntimeError, StateError):  # its store is gone
                    return False
            made[order.key] = order.made
        return True
