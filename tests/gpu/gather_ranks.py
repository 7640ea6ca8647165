"""One rank of a run on GPUs: `python -m tests.gpu.gather_ranks RANK WORLD FILE DEVICE RECIPE`. Trains a model whose
weights FSDP2 gathers itself, then in FP8. DEVICE is "cuda" (NCCL) or "cpu" (gloo). Prints one line of JSON: losses,
whether the parameters are equal bit for bit, bytes gathered, and whether the shards' casts were compiled."""

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from te_inductor.distributed import low_precision_all_gather
from te_inductor.distributed.fsdp import casts


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


def main(rank: int, world: int, file: str, device: str, recipe: str) -> None:
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    told: list[Any] = []
    for low in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Block(), Block()).to(place)
        counted = Counting()
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
            block.set_custom_all_gather(counted)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if low:
            low_precision_all_gather(model, recipe, fallback="error")
        for block in model:  # named, as layers of this size do not pay
            block.compile(backend="te", fullgraph=True, options={"policy": {"*": recipe}, "fallback": "error"})
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(6):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(256, 512, device=place)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        told.append((losses, [p.full_tensor().detach().clone() for p in model.parameters()], counted.bytes))
    (losses, plain, before), (low_losses, gathered, after) = told
    equal = all(torch.equal(a, b) for a, b in zip(plain, gathered, strict=True))
    compiled = not casts._failed
    print(json.dumps({"losses": [losses, low_losses], "equal": equal, "bytes": [before, after], "compiled": compiled}))
    dist.barrier()
    del model, block, optimizer
    torch._dynamo.reset()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
