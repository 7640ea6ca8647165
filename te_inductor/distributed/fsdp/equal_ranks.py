"""The check that all ranks gather the same weights in low precision: made before they do, as ranks that do not would
read each other's bytes as something else, or wait for ever."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from te_inductor.errors import GatherError


def check_ranks(group: Any, weights: Sequence[str], device: torch.device) -> None:
    """Compare what each weight is called and cast to. A rank that does not come keeps the others waiting for the
    timeout of the process group, which is an error.

    Raises:
        GatherError: ranks differ.
    """
    digest = int.from_bytes(hashlib.sha256("\n".join(weights).encode()).digest()[:7], "big")
    own = torch.tensor([len(weights), digest], dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    told = [tuple(one.tolist()) for one in found]
    if len(set(told)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    numbers = ", ".join(f"rank {rank}: {number}" for rank, (number, _) in zip(ranks, told, strict=True))
    what = "numbers of weights" if len({number for number, _ in told}) > 1 else "weights, though as many"
    raise GatherError(
        f"ranks would gather other {what} in low precision ({numbers}), expected the same names, shapes and recipes on"
        " all ranks; call low_precision_all_gather with the same model, recipe and policy on each"
    )
