"""Whether the ranks of a group have decided alike about the layers of a graph whose tensors go between them; and the choice
between a graph's two forms under delayed scaling, where ranks exchange tensors inside of it.

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

A rank that comes to run a layer otherwise than it has before, under another recipe or in another region, may be the
only one, while the others run what they have compiled before. So it waits for them: all ranks come to compile what is
new, or it raises.

Whether experts pay is weighed by how many rows a rank sends, which may be more than others do. There the first rank to
compile them decides for all that exchange rows with it, and for all later numbers of rows, but about layers that a
policy names.

# Note [Ranks that choose]
The graph of a first step has other collectives than the later one, as the amaxes of what ranks exchange are reduced
before the casts. So all ranks of these collectives have to run the same one of the two: that of a first step for as long
as any rank has a quantizer without history, be it one that has nothing to do with other ranks.

No rank asks the others at each call. They tell each other what each of them lacks (`any_rank`) before the first
call, then before ever fewer calls until none lacks anything, and where state was loaded. That is at the same calls on all
ranks, which count those of the layers that exchange tensors, with the same parameters, whichever graph has them: a rank
that compiles a graph anew, as its own tensors have other sizes, goes on counting. One that comes to tell and finds nobody,
as where it alone has loaded state, raises."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist

from te_inductor.distributed import agreement
from te_inductor.distributed.agreement import Agreement
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.distributed.world import current, digest, exchanged, tell
from te_inductor.errors import GatherError, StateError
from te_inductor.tensor_tables import TensorTable

_YES = "yes"
_REMEDY = "compile the same graph with the same options on all of them"


def of_first(kind: str, layers: object, decided: Sequence[str]) -> tuple[int, list[str]] | None:
    """What the first rank to compile these layers has decided, perhaps this one now: its number, and a line a layer.
    None without a process group."""
    world = current()
    if world is None or world.is_fake:
        return None
    name = f"{kind}/{digest(layers)}"
    return world.first(name, json.dumps([world.rank, *decided]))


def compare(layers: object, decided: Sequence[str], kind: str = "decided") -> None:
    """Compare with the first rank that compiled these layers; `decided` is a line a layer, of that kind.

    Raises:
        GatherError: it has decided otherwise.
    """
    world = current()
    if world is None:
        return
    world.compiles[f"{kind} {layers}"] = count = world.compiles.get(f"{kind} {layers}", 0) + 1
    found = of_first(kind, [layers, count], decided)
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


class Change(NamedTuple):
    """What a rank comes to do otherwise than it has before."""

    agreement: Agreement
    before: str
    decided: str


_decided: TensorTable[dict[str, list[str]]] = TensorTable()  # by a layer's parameter, then by what ranks call the layer


def changes_of(parameter: Tensor, groups: Iterable[tuple[int, ...]], layer: object, decided: str) -> Iterator[Change]:
    """Notes what this rank has decided about a layer, and yields a change for each of the groups of ranks with which the
    layer exchanges tensors, where it had decided otherwise."""
    known = _decided.setdefault(parameter, {}).setdefault(repr(layer), [])
    if decided not in known:
        for ranks in sorted(groups) if known else ():
            agreed = agreement.agreement_of(AmaxGroup(ranks), ["decided", layer, decided])
            yield Change(agreed, known[-1], decided)
        known.append(decided)


def follow(changes: Sequence[Change]) -> None:
    """Has all ranks come to what one of them does otherwise than before.

    Raises:
        GatherError: one did not come.
    """
    why_not = agreement.together([one.agreement for one in changes]) if changes else ""
    if why_not:
        raise GatherError(
            f"rank {dist.get_rank()} would run a layer otherwise than ranks with which it exchanges tensors:"
            f" {changes[0].decided!r}, where it had {changes[0].before!r} until now ({why_not}); {_REMEDY}"
        )


@dataclass
class FormChoice:
    """The choice for the calls of some layers with the same parameters."""

    groups: tuple[AmaxGroup, ...]
    is_first: bool = True
    calls: int = 0
    first_calls: int = 0  # those of them that ran the graph of a first step
    asked: int = -1  # how many calls there were when the ranks last told each other
    loads: int = 0  # how often state was loaded until then

    def of_call(self, lacks: bool, loads: int, state: Callable[[], str]) -> bool:
        """Whether a call runs the graph of a first step. `lacks`: this rank has a quantizer without history; `loads`: how
        often state was loaded here; `state` returns a digest of what all ranks have alike.

        Raises:
            StateError: another rank does not come to tell what it lacks, or has loaded other state.
        """
        waits = is_due(self.calls, self.asked) if self.is_first else lacks
        if waits or loads != self.loads:
            for group in self.groups:
                lacks = any_rank(group, lacks)
                if loads != self.loads:
                    _compare_states(group, state())
            self.is_first, self.asked, self.loads = lacks, self.calls, loads
        self.calls += 1
        self.first_calls += self.is_first
        return self.is_first


def any_rank(group: AmaxGroup, own: bool, topic: str = "lacks") -> bool:
    """Whether something is so on any rank of a group, each of which waits for the others.

    Raises:
        StateError: one did not come before the timeout of the default process group.
    """
    return _YES in exchanged(group.ranks, topic, _YES if own else "no", alone, math.inf)


def alone(rank: int, missing: Sequence[int], waited: float) -> StateError:
    """The error about a rank that alone has something to say of its state."""
    return StateError(
        f"rank {rank} waited {waited:.0f} s to hear how a step under delayed scaling runs on"
        f" {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}, with which its layers exchange"
        " tensors, expected all of these ranks; call the model, and te_inductor.load_state_dict, on all ranks equally"
        " often"
    )


def _compare_states(group: AmaxGroup, state: str) -> None:
    if len(exchanged(group.ranks, "states", state, alone, agreement.PATIENCE)) > 1:
        raise StateError(
            f"rank {dist.get_rank()} has loaded another state of delayed scaling than others of ranks"
            f" {', '.join(map(str, group.ranks))}, whose layers exchange tensors in FP8, expected one scale of each tensor;"
            " load the same state on all of them"
        )


_choices: TensorTable[dict[str, FormChoice]] = TensorTable()  # by a parameter of the layers, then by their name


def choice_of(parameter: Tensor, layers: str, groups: Iterable[AmaxGroup]) -> FormChoice:
    """The choice of some layers, all of them in one string, of which one has this parameter."""
    known = _choices.setdefault(parameter, {})
    return known.get(layers) or known.setdefault(layers, FormChoice(_ordered(groups)))


def _ordered(groups: Iterable[AmaxGroup]) -> tuple[AmaxGroup, ...]:
    """Groups in one order on all ranks of a mesh, whose groups along one of its dimensions have ranks equally far apart."""
    return tuple(sorted(groups, key=lambda group: [rank - group.ranks[0] for rank in group.ranks]))


def all_interpret(layers: str, groups: Iterable[AmaxGroup], may: bool) -> bool:
    """Whether all ranks with which these layers exchange tensors interpret first steps, which this one may: Note [Ranks
    that interpret]. Asks them once a process group.

    Raises:
        StateError: another rank does not come to tell.
    """
    world, ordered = current(), _ordered(groups)
    if world is None:
        return may
    key = layers, *(group.ranks for group in ordered)
    if key not in world.interpreted:
        for group in ordered:
            may = not any_rank(group, not may, _about(layers))
        world.interpreted[key] = may
    return world.interpreted[key]


def interpret_none(layers: str, groups: Iterable[AmaxGroup]) -> None:
    """Tell these ranks, if they are still to hear of this one, not to wait: it could not compile the layers."""
    world, ordered = current(), _ordered(groups)
    key = layers, *(group.ranks for group in ordered)
    if world is not None and not world.is_fake and key not in world.interpreted:
        world.interpreted[key] = False
        for group in ordered:
            tell(world, group.ranks, _about(layers), _YES)


def _about(layers: str) -> str:
    return f"interprets {digest(layers)}"


def is_due(calls: int, asked: int) -> bool:
    """Whether to ask again what was asked before `asked` of these calls: before each of the first calls, then after an
    eighth as many again. The answer may never come, as for a layer whose gradient is always zero, and asking makes the
    host wait for the device."""
    return calls > asked + asked // 8
