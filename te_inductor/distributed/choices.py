"""The choice between a graph's two forms under delayed scaling, where ranks exchange tensors inside of it.

# Note [Ranks that choose]
The graph of a first step has other collectives than the later one, as the amaxes of what ranks exchange are reduced
before the casts. So all ranks of these collectives have to run the same one of the two: that of a first step for as long
as any rank has a quantizer without history, be it one that has nothing to do with other ranks.

No rank asks the others at each call. They tell each other what each of them lacks (`agreement.any_rank`) before the first
call, then before ever fewer calls until none lacks anything, and where state was loaded. That is at the same calls on all
ranks, which count those of the layers that exchange tensors, with the same parameters, whichever graph has them: a rank
that compiles a graph anew, as its own tensors have other sizes, goes on counting. One that comes to tell and finds nobody,
as where it alone has loaded state, raises."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from te_inductor.distributed import agreement
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.tensor_tables import TensorTable


@dataclass
class FormChoice:
    """The choice for the calls of some layers with the same parameters."""

    groups: tuple[AmaxGroup, ...]
    is_first: bool = True
    calls: int = 0
    asked: int = -1  # how many calls there were when the ranks last told each other
    loads: int = 0  # how often state was loaded until then

    def of_call(self, lacks: bool, loads: int) -> bool:
        """Whether a call runs the graph of a first step. `lacks`: this rank has a quantizer without history; `loads`: how
        often state was loaded here.

        Raises:
            StateError: another rank does not come to tell what it lacks.
        """
        waits = is_due(self.calls, self.asked) if self.is_first else lacks
        if waits or loads != self.loads:
            for group in self.groups:
                lacks = agreement.any_rank(group, lacks)
            self.is_first, self.asked, self.loads = lacks, self.calls, loads
        self.calls += 1
        return self.is_first


_choices: TensorTable[dict[str, FormChoice]] = TensorTable()  # by a parameter of the layers, then by their name


def choice_of(parameter: Tensor, layers: str, groups: Iterable[AmaxGroup]) -> FormChoice:
    """The choice of some layers, all of them in one string, of which one has this parameter."""
    # In one order on all ranks of a mesh, whose groups along one of its dimensions have ranks equally far apart.
    ordered = sorted(groups, key=lambda group: [rank - group.ranks[0] for rank in group.ranks])
    return _choices.setdefault(parameter, {}).setdefault(layers, FormChoice(tuple(ordered)))


def is_due(calls: int, asked: int) -> bool:
    """Whether to ask again what was asked before `asked` of these calls: before each of the first calls, then after an
    eighth as many again. The answer may never come, as for a layer whose gradient is always zero, and asking makes the
    host wait for the device."""
    return calls > asked + asked // 8
