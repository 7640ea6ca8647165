"""Wrappers of data-parallel training: FSDP2, FSDP's first version, and DDP."""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from te_inductor.compat.dynamo import guard_on


def is_gathered(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 gathers it for each forward and lets go of its memory behind."""
    return any(one.whole is parameter for one in gathered())


class Gathered(NamedTuple):
    """A parameter under FSDP2. A module holds its shards, or during its forward the whole."""

    shards: Sequence[torch.Tensor]
    whole: torch.Tensor | None  # None before it is gathered first


def gathered() -> Iterator[Gathered]:
    """Every parameter of this process that FSDP2 gathers."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        return
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        # The first is 2.15's name, the second what earlier releases have.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for one in (one for group in groups if group is not None for one in group.fsdp_params):
            shards = [getattr(one, name, None) for name in ("sharded_param", "_sharded_post_forward_param")]
            yield Gathered([s for s in shards if s is not None], getattr(one, "_unsharded_param", None))


def is_sharded_module(module: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called with it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flattened_module(module: torch.nn.Module) -> bool:
    """Whether it is one of FSDP's first version, whose layers hold views of one flat parameter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def inside_ddp() -> bool:
    """Whether the forward of a torch DistributedDataParallel runs, whose `_get_active_ddp_module` Dynamo asks as well.
    The graph that is being compiled is compiled anew where the answer is another."""
    guard_on("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", by_type=True)
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None  # type: ignore[no-untyped-call]
