"""The choice of one option for each item that has the least cost within a budget of time: an exact search."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Alternative(NamedTuple):
    """What one choice for an item takes and costs."""

    time: int  # in any unit: integers, so that equal sums are equal
    cost: float


def choose(items: Sequence[Sequence[Alternative]], budget: int) -> list[int] | None:
    """The place of the option to take of each item, so that the times add up to at most `budget` and the costs are least;
    among equal costs the times are. None where even the fastest options exceed the budget.

    States are sums of times and costs of the first items, of which none is worse than another in both (Nemhauser and
    Ullmann). A state is dropped where not even the relaxed problem of the items that follow, in which options may be
    mixed, makes it better than a choice that is known: the greedy one along the relaxed problem (Dyer; Zemel)."""
    steps = [_hull(options) for options in items]
    fastest = [min(options) for options in items]
    if sum(option.time for option in fastest) > budget:
        return None
    bounds = [_Bound(fastest[place:], [step for hull in steps[place:] for step in hull]) for place in range(len(items))]
    # Sums of costs in another order differ in their last digits.
    known = bounds[0].greedy(budget) + 1e-9 * abs(bounds[0].cost) if items else 0.0
    states: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for place, options in enumerate(items):
        rest = bounds[place + 1] if place + 1 < len(items) else _Bound([], [])
        made = sorted(
            (time + option.time, cost + option.cost, (*chosen, number))
            for time, cost, chosen in states
            for number, option in enumerate(options)
        )
        states, least = [], float("inf")
        for time, cost, chosen in made:
            if cost < least and cost + rest.least(budget - time) <= known:
                states.append((time, cost, chosen))
                least = cost
    return list(states[-1][2])  # costs fall as times rise


class _Step(NamedTuple):
    """A step from one option to the next slower one on an item's convex hull."""

    gain: float  # of cost for each unit of time
    time: int
    saved: float


def _hull(options: Sequence[Alternative]) -> list[_Step]:
    """The steps of the options that a mix of others does not beat, from the fastest on; gains fall."""
    hull: list[Alternative] = []
    for option in sorted(options):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return [_Step(_gain(one, other), other.time - one.time, one.cost - other.cost) for one, other in pairwise(hull)]


def _gain(one: Alternative, other: Alternative) -> float:
    return (one.cost - other.cost) / (other.time - one.time)


class _Bound:
    """The relaxed problem of some items: from the fastest options on, the steps of most gain are taken first."""

    def __init__(self, fastest: Sequence[Alternative], steps: Sequence[_Step]) -> None:
        self.time, self.cost = sum(one.time for one in fastest), sum(one.cost for one in fastest)
        self.steps = sorted(steps, reverse=True)
        self.times = [0, *accumulate(step.time for step in self.steps)]
        self.saved = [0.0, *accumulate(step.saved for step in self.steps)]

    def least(self, budget: int) -> float:
        """A cost that no choice within the budget is below; infinite where there is no choice."""
        left = budget - self.time
        if left < 0:
            return float("inf")
        place = bisect_right(self.times, left) - 1
        part = (left - self.times[place]) * self.steps[place].gain if place < len(self.steps) else 0.0
        return self.cost - self.saved[place] - part

    def greedy(self, budget: int) -> float:
        """The cost of a choice within the budget: the steps up to the first one that does not fit."""
        return self.cost - self.saved[bisect_right(self.times, budget - self.time) - 1]
