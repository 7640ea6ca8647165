"""Whether the ranks of a group have decided alike about the layers of a graph whose tensors go between them.

# Note [Ranks that decide]
A rank that gathers bytes where another gathers bf16 would read them as something else, or wait for ever. Ranks decide
alike where they compile equal graphs with equal options; nothing makes them. So each rank that compiles such a graph
leaves what it has decided in the key-value store of the default process group, and looks at what the first rank to
compile the same layers has left there. Nobody waits: a rank that never compiles the graph keeps no other, and one that
finds a difference raises before it reaches a collective. The others end with the process group's timeout, as they do for
a rank that raises anywhere else. Whether the compile succeeded is compared likewise, behind it: a graph that one rank
alone could not compile, and runs as the user wrote it, has other collectives there.

What "the same layers" are is part of the key: the groups, the modules and the sizes, and how often this rank has compiled
them. Ranks with other sizes are not compared, so that no two graphs are that need not be equal.

Whether experts pay is weighed by how many rows a rank sends, which may be more than others do. There the first rank to
compile them decides for all that exchange rows with it, but about layers that a policy names."""

import hashlib
import json
from collections.abc import Sequence

from torch import distributed as dist

from te_inductor.distributed import agreement
from te_inductor.errors import GatherError

_REMEDY = "compile the same graph with the same options on all of them"


def of_first(kind: str, layers: object, decided: Sequence[str]) -> tuple[int, list[str]] | None:
    """What the first rank to compile these layers has decided, perhaps this one now: its number, and a line a layer.
    None without a process group."""
    world = agreement.current()
    if world is None or world.is_fake:
        return None
    name = f"{kind}/{hashlib.sha256(repr(layers).encode()).hexdigest()[:16]}"
    world.compiles[name] = count = world.compiles.get(name, 0) + 1
    return world.first(f"{name}/{count}", json.dumps([world.rank, *decided]))


def compare(layers: object, decided: Sequence[str], kind: str = "decided") -> None:
    """Compare with the first rank that compiled these layers; `decided` is a line a layer, of that kind.

    Raises:
        GatherError: it has decided otherwise.
    """
    found = of_first(kind, layers, decided)
    if found is None or found[1] == list(decided):
        return
    first, lines = found
    own, other = next(
        (pair for pair in zip(decided, lines, strict=False) if pair[0] != pair[1]), ("nothing", "nothing")
    )
    raise GatherError(
        f"rank {dist.get_rank()} would run a layer otherwise than rank {first}, with which it exchanges tensors: {own!r},"
        f" where rank {first} has {other!r}; {_REMEDY}"
    )
