"""Module paths as the model's author knows them, without what adapters and data parallelism add."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

# What peft puts around a model, and in a layer's place around the layer.
_ADAPTED = re.compile(r"^base_model\.model(\.|$)|(^|\.)base_layer(?=\.|$)")
_DDP = re.compile(r"^module\.")
HIDDEN = ", or earlier entries match the same"  # of a policy entry that matches nothing


def plain(path: str) -> str:
    """A path without what peft adds to it: that of the layer in the model as it was before."""
    return _ADAPTED.sub("", path).strip(".")


def names_of(path: str) -> tuple[str, ...]:
    """The names by which a glob may name a layer, the plain path first: as in the model, as in the adapted model, and
    as inside of a DistributedDataParallel."""
    inner = _DDP.sub("", path)
    return tuple(dict.fromkeys((plain(path), path, plain(inner), inner)))


def shown(fqns: Iterable[str]) -> str:
    """Module paths for a message: the first ones, and how many more there are."""
    names = list(dict.fromkeys(plain(fqn) or "(root)" for fqn in fqns))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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
