"""One quantizer has one state, however many threads ask for it at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn

from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.extra_inputs import GraphCall
from te_inductor.runtime.state import store
from te_inductor.runtime.state.state_inputs import StateInput, StateInputs, StateReader
from te_inductor.runtime.state.state_sites import StateSite
from te_inductor.runtime.state.store import Key, states_of

RECIPE = DelayedScaling(amax_history_len=4)
KEY = Key(StateSite("", "", "", "input"), RECIPE)


def graph(*keys: Key) -> StateInputs:
    """A graph whose first inputs are parameters, one a key; all share one quantizer."""
    readers = [StateReader(place, key) for place, key in enumerate(keys)]
    return StateInputs("warn", quantizers=[StateInput(readers, "", 0, recorded=True)])


def taken(graph: StateInputs, weights: list) -> list:
    """What a call with these parameters takes of the state."""
    return graph.tensors(GraphCall(weights))


@pytest.fixture
def meeting(monkeypatch):
    """Both threads wait for each other inside of what only one may do at a time."""
    barrier = threading.Barrier(2)

    def meet(name: str) -> None:
        original = getattr(store, name)

        def slow(*args):
            with suppress(threading.BrokenBarrierError):  # the other one does not come: it waits for the lock
                barrier.wait(0.2)
            return original(*args)

        monkeypatch.setattr(store, name, slow)

    return meet


def both(*calls) -> list:
    with ThreadPoolExecutor(2) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


@pytest.mark.parametrize("graphs", [1, 2])
def test_two_threads_make_one_state(graphs, meeting):
    meeting("_empty")
    weight = nn.Parameter(torch.randn(4, 4))
    first = graph(KEY)
    second = first if graphs == 1 else graph(KEY)
    a, b = both(lambda: taken(first, [weight]), lambda: taken(second, [weight]))
    (state,) = states_of(weight).values()
    assert a[0] is b[0] is state.tensor


def test_two_threads_join_states_once(meeting):
    """Two graphs that each join what was apart end with the same tensors."""
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    for weight in weights:
        taken(graph(KEY), [weight])[0][:-1].fill_(2.0)  # its history
    meeting("_of_site")
    a, b = both(lambda: taken(graph(KEY, KEY), weights), lambda: taken(graph(KEY, KEY), weights[::-1]))
    held = {id(state.tensor) for weight in weights for state in states_of(weight).values()}
    assert held == {id(taken(graph(KEY, KEY), weights)[0])}
    assert held <= {id(a[0]), id(b[0])}


def test_state_is_handed_on_beside_a_thread_that_makes_it(meeting):
    """A parameter is replaced while a call makes the state of the new one."""
    layer, new = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    taken(graph(KEY), [layer.weight])
    meeting("_empty")
    both(lambda: taken(graph(KEY), [new]), lambda: setattr(layer, "weight", new))
    (state,) = states_of(new).values()
    # It is chance which came first; the graph's next call has what `state_dict` exports.
    assert taken(graph(KEY), [new])[0] is state.tensor
