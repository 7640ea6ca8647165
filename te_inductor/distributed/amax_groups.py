"""The ranks over which delayed scaling reduces its amaxes.

# Note [Amax groups]
A scale is right for the ranks that compute with the same parameter: those over which it is sharded or replicated. Ranks
that hold other parameters, as the other stages of a pipeline, have nothing to do with it, and reducing over all ranks
would mix scales or wait for ever. So the default is found from the parameter: the mesh of FSDP2 or of a DTensor, or the
process group of the DistributedDataParallel that runs. ``options["amax_group"]`` takes another one. Where there is
neither, each rank keeps its own scales; so it does in a DistributedDataParallel with ``find_unused_parameters`` or in
``join()``, whose ranks may run other layers, or one of them more often, and would take each other's amaxes.

A graph knows process groups by name, since a name can stand in a graph and in the keys of compile caches. A mesh of
several dimensions has a process group for each: the largest over all of its ranks is found dimension by dimension."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist

from te_inductor import compat
from te_inductor.errors import OptionError, StateError, wrong_type
from te_inductor.tensor_tables import TensorTable

NONE = "none"  # as an option: each rank keeps its own scales
_EXPECTED = 'a torch.distributed DeviceMesh, a ProcessGroup, a process group\'s name, or "none"'


@dataclass(frozen=True, order=True)
class AmaxGroup:
    """The ranks that take the largest of their amaxes. Each rank has the groups that it is in in the same order."""

    ranks: tuple[int, ...] = ()  # of the default process group
    names: tuple[str, ...] = ()  # of process groups that reach them all, if one reduces over one after another

    def __bool__(self) -> bool:
        return bool(self.names)


OWN = AmaxGroup()  # each rank keeps its own


def several_ranks() -> bool:
    """Whether there is anything to reduce over."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def resolve(found: object, name: str = "option 'amax_group'") -> AmaxGroup | None:
    """What the option asks for; None where it leaves the choice to us.

    Raises:
        OptionError: it is no group of this process, or this rank is not in it.
    """
    if found is None or isinstance(found, AmaxGroup):
        return found
    if found == NONE:
        return OWN
    if not dist.is_available():
        raise OptionError(f"{name} is {found!r}, but this torch has no torch.distributed, expected None")
    if isinstance(found, str):
        return _of_groups([_named(found, name)])
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise OptionError(f"{name} is GroupMember.NON_GROUP_MEMBER, as new_group returns for a group {_not_member()}")
    if isinstance(found, dist.ProcessGroup):
        if found not in dist.distributed_c10d._world.pg_names:
            raise OptionError(f"{name} is a process group that was destroyed, expected one that exists; {_REMEDY}")
        return _of_groups([found])
    if isinstance(found, dist.device_mesh.DeviceMesh):
        if found.get_coordinate() is None:
            raise OptionError(f"{name} is a DeviceMesh of ranks {found.mesh.flatten().tolist()}, {_not_member()}")
        return of_mesh(found)
    raise OptionError(wrong_type(name, found, _EXPECTED))


_REMEDY = 'make the group before the first call, or pass "none"'


def _not_member() -> str:
    return f'that rank {dist.get_rank()} is not in, expected one that it is in; pass each rank its own, or "none"'


def _named(found: str, name: str) -> dist.ProcessGroup:
    groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    known: dict[str, dist.ProcessGroup] = {name: group for group, name in groups.items()}
    if found not in known:
        there = f"those of this rank are {', '.join(map(repr, known))}" if known else "torch.distributed has none yet"
        raise OptionError(f"{name} is {found!r}, expected {_EXPECTED}; {there}; {_REMEDY}")
    return known[found]


def of_mesh(mesh: Any) -> AmaxGroup:
    """All ranks of a DeviceMesh that this rank is in."""
    return _of_groups(mesh.get_all_groups(), mesh.mesh.flatten().tolist())


def of_process_group(group: dist.ProcessGroup) -> AmaxGroup:
    return _of_groups([group])


def _of_groups(groups: Sequence[dist.ProcessGroup], ranks: Sequence[int] | None = None) -> AmaxGroup:
    """Makes a group of a mesh's dimensions, of which those of one rank have nothing to say."""
    names = tuple(group.group_name for group in groups if group.size() > 1)
    found = dist.get_process_group_ranks(groups[0]) if ranks is None else ranks
    return AmaxGroup(tuple(sorted(found)), names) if names else OWN


_by_parameter: TensorTable[tuple[Any, AmaxGroup | None]] = TensorTable()  # its mesh as a DTensor, and what meshes say


def of_parameter(parameter: Tensor) -> AmaxGroup | None:
    """The ranks over which a parameter, as graphs see it, is sharded or replicated; None if nothing tells."""
    if not several_ranks():
        return None
    mesh = mesh_of(parameter)
    if mesh is not None:
        return mesh
    group = compat.ddp_group_of(parameter)
    return None if group is None else of_process_group(group)


def mesh_of(parameter: Tensor) -> AmaxGroup | None:
    """The same by its mesh alone, as graphs guard on it: cheap from the second time on."""
    if not _is_known(parameter):
        for one in compat.gathered():
            if one.whole is not None and not _is_known(one.whole):
                _by_parameter[one.whole] = compat.mesh_of_dtensor(one.whole), of_mesh(one.mesh)
    if not _is_known(parameter):
        mesh = compat.mesh_of_dtensor(parameter)
        _by_parameter[parameter] = mesh, None if mesh is None else of_mesh(mesh)
    return _by_parameter[parameter][1]


def _is_known(parameter: Tensor) -> bool:
    """Whether what is known is of the mesh that it has, if it is a DTensor."""
    found = _by_parameter.get(parameter, None)
    return found is not None and found[0] is compat.mesh_of_dtensor(parameter)


_gathered_with: TensorTable[weakref.ref[Any]] = TensorTable()  # what FSDP2 gathers at once, by each of these parameters


def reduces_gradient(parameter: Tensor) -> bool | None:
    """Whether the next backward reduces the gradient of a parameter that FSDP2 has gathered, which
    `set_requires_gradient_sync` decides; None of any other parameter."""
    known = _gathered_with.get(parameter, None)
    group = compat.fsdp_group_of(parameter) if known is None else known()
    if group is None:
        return None
    if known is None:
        _gathered_with[parameter] = weakref.ref(group)
    return bool(group.reduce_grads)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that a graph knows by this name.

    Raises:
        StateError: there is none any more.
    """
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError) as error:
        raise StateError(gone(name)) from error


def left_alone(name: str, error: Exception) -> str:
    others = [rank for rank in dist.get_process_group_ranks(process_group(name)) if rank != dist.get_rank()]
    return (
        f"rank {dist.get_rank()} could not reduce amaxes of delayed scaling over process group {name!r}, expected"
        f" {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} to run the same step; have all ranks"
        " run equally many steps, put forwards that others do not run under torch.no_grad(), or pass"
        f" options={{'amax_group': 'none'}} (torch said {str(error)!r})"
    )


def gone(name: str) -> str:
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process, which has no process group any more,"
    return (
        f"{rank} would reduce amaxes of delayed scaling over process group {name!r}, which was destroyed since the graph"
        " was compiled, expected one that exists; call torch._dynamo.reset() behind the new groups' set-up"
    )
