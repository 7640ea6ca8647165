"""Cases of process groups that come after others, for test_regrouped.py."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.recipes import DelayedScaling
from tests.ranks import Rank


class Model(nn.Module):  # under DDP Dynamo compiles the frames of user code alone
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 48)

    def forward(self, x):
        return self.layer(x)


OPTIONS = {"recipe": DelayedScaling(amax_history_len=4)}


def again(rank: Rank) -> Any:
    """The state of a model in a second default process group, before which one rank alone has run another model; and
    whether the first group's store was let go of, whose server has to end with the group."""
    if rank.rank == 0:
        torch.compile(Model(), backend="te", options=OPTIONS)(torch.ones(8, 32)).sum().backward()
    known = weakref.ref(dist.distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    gone = known() is None
    place = f"file://{rank.folder}/again"
    dist.init_process_group("gloo", init_method=place, rank=rank.rank, world_size=rank.world)
    model = Model()
    run = torch.compile(DistributedDataParallel(model), backend="te", options=OPTIONS)
    for _ in range(2):
        run(torch.full((8, 32), 1.0 + rank.rank)).sum().backward()
    return {key: value.tolist() for key, value in te_inductor.state_dict(model).items()}, gone
