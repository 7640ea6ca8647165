"""`python -m tests.backend.amax_group_caches`: hits and misses of AOTAutograd's cache, as one line of JSON, of a model
that is compiled for a group of ranks, for the same one again, and for another one. One process plays rank 0 of four."""

import json

import torch
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_inductor.recipes import DelayedScaling


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    one, other = dist.new_group([0, 1]), dist.new_group([0, 2])
    found = []
    for group in (one, one, other):
        torch._dynamo.reset()
        counters.clear()
        options = {"recipe": DelayedScaling(amax_history_len=4), "amax_group": group}
        run = torch.compile(torch.nn.Linear(32, 32), backend="te", options=options)
        for _ in range(2):  # a graph enters the cache when its backward is compiled, and a first step's is another one
            run(torch.ones(16, 32)).sum().backward()
        caches = counters["aot_autograd"]
        found.append({name: caches[f"autograd_cache_{name}"] for name in ("hit", "miss")})
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
