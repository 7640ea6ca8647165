"""Module paths as the model's author knows them, without what adapters and data parallelism add; and layers that differ in
a number of their paths alone, such as those of equal blocks, under one name."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TypeVar

# Wrappers of compilers, checkpoints, FSDP and Fabric, which are no part of the path that the model's author sees.
_WRAPPERS = re.compile(
    r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)(\.|$)|\bslice\([^)]*\)(\.|$)"
)
# What peft puts in a layer's place around the layer, and around a model.
_BASE_LAYER = re.compile(r"(^|\.)base_layer(?=\.|$)")
_BASE_MODEL = re.compile(r"(^|\.)base_model\.model(?=\.|$)")
_DDP = re.compile(r"^module\.")
HIDDEN = ", or earlier entries match the same"  # of a policy entry that matches nothing


def without_wrappers(path: str) -> str:
    """A module's or parameter's path without what compilers and frameworks that shard or checkpoint add to it."""
    return _WRAPPERS.sub("", path).strip(".")


def layer_path(path: str) -> str:
    """A path without wrappers, and without the adapters around its layer."""
    return _BASE_LAYER.sub("", without_wrappers(path)).strip(".")


def plain(path: str) -> str:
    """A path without all that wrappers and peft add to it: that of the layer in the model as its author knows it."""
    return _BASE_MODEL.sub("", layer_path(path)).strip(".")


def names_of(path: str) -> tuple[str, ...]:
    """The names by which a glob may name a layer, the plain path first: as in the model, as in the adapted model, and
    as inside of a DistributedDataParallel."""
    inner = _DDP.sub("", without_wrappers(path))
    return tuple(dict.fromkeys((plain(path), path, plain(inner), inner)))


def shown(fqns: Iterable[str]) -> str:
    """Module paths for a message: the first ones, and how many more there are."""
    return first_of(list(dict.fromkeys(plain(fqn) or "(root)" for fqn in fqns)))


def first_of(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(entry: str, fqns: Iterable[str]) -> str:
    """What a policy entry that matches nothing may have been meant to match: a path by another root, or one like it."""
    parts = entry.split(".")
    shorter = [".".join(parts[place:]) for place in range(1, len(parts))]
    for glob in [*shorter, f"*.{entry}"]:
        found = next((fqn for fqn in fqns if fnmatchcase(fqn, glob)), None)
        if found is not None:
            return f"; nearest: {found!r}, which {glob!r} matches, as paths start at the module whose code was compiled"
    close = get_close_matches(entry, fqns, n=1)
    return f"; nearest: {close[0]!r}" if close else ""


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
