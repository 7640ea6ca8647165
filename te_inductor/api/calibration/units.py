"""Layers that have one choice together: what each choice takes and loses, and the policy that follows from them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import Any

from te_inductor.api.calibration.errors import Lost
from te_inductor.api.calibration.knapsack import Alternative
from te_inductor.api.calibration.policy import glob_of
from te_inductor.api.calibration.times import NAMES, Choice, GraphTimes, Group, by_gemm

_PICOSECONDS = 1e12


@dataclass(frozen=True)
class Unit:
    """Layers that have one choice."""

    groups: list[Group]

    @property
    def layers(self) -> dict[str, tuple[Any, int, int]]:
        return {fqn: sizes for group in self.groups for fqn, sizes in group.layers.items()}

    @functools.cached_property  # which is asked for again and again, and whose keys are large
    def gains(self) -> dict[Choice, float]:
        """Seconds that each choice saves that all groups can have."""
        common = [choice for choice in self.groups[0].gains if all(choice in group.gains for group in self.groups)]
        return {choice: sum(group.gains[choice] for group in self.groups) for choice in common}

    @property
    def names(self) -> list[str]:
        """The recipes that some choice has for some GEMM."""
        found = {name for choice in self.gains for name in by_gemm(choice).values()}
        return [name for name in NAMES if name in found]

    @property
    def high_s(self) -> float:
        return sum(group.high_s for group in self.groups)

    @property
    def fastest(self) -> Choice:
        return max(self.gains, key=self.gains.__getitem__)

    def cost(self, choice: Choice, lost: Lost) -> float:
        """What all products lose together."""
        return sum(lost.counted(fqn, gemm, name) for fqn in self.layers for gemm, name in by_gemm(choice).items())

    def options(self, lost: Lost) -> list[Alternative]:
        return [
            Alternative(round((self.high_s - gain) * _PICOSECONDS), self.cost(choice, lost))
            for choice, gain in self.gains.items()
        ]

    def times(self, chosen: Choice) -> dict[str, float]:
        """Seconds under each recipe as it is, in high precision, and as chosen."""
        found = {choice.name: gain for choice, gain in self.gains.items() if choice and choice.backward is None}
        gains = found | {"none": 0.0, "chosen": self.gains[chosen]}
        return {name: self.high_s - gain for name, gain in gains.items()}

    def why(self, chosen: Choice, lost: Lost) -> str:
        refusal = next((group.refusal for group in self.groups if group.refusal), None)
        if chosen is None and refusal is not None:
            return refusal
        if self.gains[chosen] >= self.gains[self.fastest]:
            return "the fastest"
        more = 1e6 * (self.gains[self.fastest] - self.gains[chosen])
        fastest = "/".join(dict.fromkeys(by_gemm(self.fastest).values()))
        loses, would = self.cost(chosen, lost), self.cost(self.fastest, lost)
        return f"loses less: {loses:.3%}, where {fastest} loses {would:.3%}, for {more:.0f} us more"


def allowed(units: Sequence[Unit], graphs: Sequence[GraphTimes], budget: float) -> int:
    """The time that all units may take together, of a step in which nothing else changes."""
    times = [[round((unit.high_s - gain) * _PICOSECONDS) for gain in unit.gains.values()] for unit in units]
    fastest, slowest = sum(map(min, times)), sum(map(max, times))
    rest = max(0.0, sum(graph.device_s for graph in graphs) - sum(unit.high_s for unit in units)) * _PICOSECONDS
    return int(max(fastest, min(budget * (fastest + rest) - rest, slowest)))


def policy_of(units: Sequence[Unit], picked: Sequence[Choice]) -> dict[str, Choice]:
    """Globs in the order of the graph, but those of modules inside of others first: a glob that names a module may
    match what is in it."""
    found = [(fqn, choice) for unit, choice in zip(units, picked, strict=True) for fqn in unit.layers]
    paths = [fqn for fqn, _ in found]
    inside = {fqn: sum(other.startswith(f"{fqn}.") for other in paths) for fqn in paths}
    return {glob_of(fqn): choice for fqn, choice in sorted(found, key=lambda one: inside[one[0]])}


def cast_alone(units: Sequence[Unit]) -> dict[str, str]:
    """The recipe under which each layer's forward is looked at: the fastest one's."""
    return {fqn: unit.fastest.name for unit in units for fqn in unit.layers if unit.fastest is not None}


def rank_correlation(units: Sequence[Unit], lost: Lost, sensitivities: Mapping[str, float]) -> float | None:
    """Spearman's, of what each forward loses, as it counts, and how far it moves the loss; None of less than two layers."""
    names = cast_alone(units)
    pairs = [(lost.counted(fqn, "fprop", names[fqn]), moved) for fqn, moved in sensitivities.items()]
    return spearman([one for one, _ in pairs], [other for _, other in pairs])


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The rank correlation of two lists; None where one of them has a single value."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """The ranks, of equal values their mean."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]
