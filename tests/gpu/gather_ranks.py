"""A case of weights that FSDP2 gathers in FP8 on GPUs, for test_low_precision_gather.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from te_inductor.distributed import low_precision_all_gather
from te_inductor.distributed.fsdp import casts
from tests.ranks import Rank


class Counting(DefaultAllGather):
    """FSDP2's all-gather, which counts the bytes that come from other ranks."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.bytes += (output_tensor.numel() - input_tensor.numel()) * input_tensor.element_size()
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 1024 + 256), nn.Linear(1024 + 256, 512)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def trains(rank: Rank, recipe: str) -> Any:
    """Trains with weights that FSDP2 gathers itself, then in FP8. Tells losses, whether parameters are equal bit for bit,
    bytes gathered, and whether the shards' casts were compiled."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    told: list[Any] = []
    for low in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Block(), Block()).to(rank.device)
        counted = Counting()
        for block in model:
            fully_shard(block, mesh=rank.mesh, mp_policy=policy)
            block.set_custom_all_gather(counted)
        fully_shard(model, mesh=rank.mesh, mp_policy=policy)
        if low:
            low_precision_all_gather(model, recipe, fallback="error")
        for block in model:  # named, as layers of this size do not pay
            block.compile(backend="te", fullgraph=True, options={"policy": {"*": recipe}, "fallback": "error"})
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(6):
            torch.manual_seed(10 * step + rank.rank)
            x = torch.randn(256, 512, device=rank.device)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        told.append((losses, [p.full_tensor().detach().clone() for p in model.parameters()], counted.bytes))
    (losses, plain, before), (low_losses, gathered, after) = told
    equal = all(torch.equal(a, b) for a, b in zip(plain, gathered, strict=True))
    compiled = not casts._failed
    return {"losses": [losses, low_losses], "equal": equal, "bytes": [before, after], "compiled": compiled}
