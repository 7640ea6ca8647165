"""The cases of a test with several parameters that `make test` runs: those marked `sample` in conftest.py."""

import itertools
from collections import Counter


def sample(cases: list[dict[str, int]], together: int) -> set[int]:
    """Numbers of cases among which all values, or pairs of values, that the cases have occur: `together` is 1 or 2."""
    combinations = [set(itertools.combinations(sorted(case.items()), min(together, len(case)))) for case in cases]
    missing = set().union(*combinations)
    used: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()
    while missing:
        gains = [len(found & missing) for found in combinations]
        # The best is, of those that bring most, the one whose values have been used least.
        best = min(range(len(cases)), key=lambda i: (-gains[i], sum(used[value] for value in cases[i].items())))
        missing -= combinations[best]
        used.update(cases[best].items())
        chosen.add(best)
    return chosen
