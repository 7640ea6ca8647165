"""Cases of parameters that FSDP2 shards, for test_streaming.py."""

import copy
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import te_inductor
from tests import ranks
from tests.support.streamed import Decoder, bits


def streams(rank: ranks.Rank) -> Any:
    """The stream of the shards and that of the whole model, before and behind a step."""
    torch.manual_seed(0)
    whole = Decoder()
    sharded = copy.deepcopy(whole)
    for block in sharded.blocks:
        fully_shard(block, mesh=rank.mesh)
    fully_shard(sharded, mesh=rank.mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (whole, sharded)]
    told = []
    for _ in range(2):
        for recipe in ("rowwise", "nvfp4_weight_only", "block"):
            found, expected = (bits(te_inductor.stream_quantized(model, recipe)) for model in (sharded, whole))
            told.append(found == expected and len(found) > 10)
        for model, optimizer in zip((whole, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.arange(6)).sum().backward()
        for mine, theirs in zip(whole.parameters(), sharded.parameters(), strict=True):  # all ranks have the same data
            assert theirs.grad is not None and torch.allclose(theirs.grad.full_tensor(), mine.grad)
            mine.grad.copy_(theirs.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
    return told
