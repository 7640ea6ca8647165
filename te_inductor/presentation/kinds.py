"""Layers that differ in a number of their module path alone, such as those of equal blocks, under one name."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from te_inductor.presentation.paths import plain

T = TypeVar("T")
K = TypeVar("K")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
_PIECES = 6  # so many ranges of numbers are written out
_FEW = 3  # paths that no ranges tell


def kind(path: str) -> str:
    """`blocks.*.mlp.up` of `blocks.3.mlp.up`, without what adapters add."""
    return _NUMBER.sub("*", plain(path))


def named(paths: Collection[str], everyone: Collection[str]) -> str:
    """One name for layers of one kind: the kind, which is a policy's glob too, where they are all of `everyone` that has
    it, else their numbers: `blocks.0-3.mlp.up`."""
    paths, everyone = list(dict.fromkeys(map(plain, paths))), set(map(plain, everyone))
    one = kind(paths[0])
    if len(paths) == 1:
        return paths[0] or "(root)"
    if set(paths) >= {path for path in everyone if kind(path) == one}:
        return one
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True))
    sets = [sorted(set(column)) for column in columns]
    if math.prod(map(len, sets)) != len(paths):  # not every number with every other
        return ", ".join(paths) if len(paths) <= _FEW else f"{one} (some)"
    texts = iter(map(_ranges, sets))
    return re.sub(r"(?<![^.])\*(?![^.])", lambda _: next(texts), one)


def chunks(paths: Sequence[str], count: int) -> list[list[str]]:
    """Layers of one kind, in their order, in at most `count` runs of nearly equal length."""
    count = max(1, min(count, len(paths)))
    ends = [round(place * len(paths) / count) for place in range(count + 1)]
    return [list(paths[start:end]) for start, end in pairwise(ends)]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items of each key, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_kind(paths: Iterable[str]) -> dict[str, list[str]]:
    """The distinct paths of each kind, in their order."""
    return grouped(dict.fromkeys(paths), kind)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3` of 0, 1, 2, 3; `{0-3,7}` of more than one range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    shown = texts[:_PIECES] + (["…"] if len(texts) > _PIECES else [])
    return shown[0] if len(shown) == 1 else f"{{{','.join(shown)}}}"
