"""One rank of a run under FSDP2: `python -m tests.backend.sharded_ranks RANK WORLD FILE [uncompiled]`.

Prints one line of JSON: by what is compiled, the keys of the state, and what came of loading it.
"""

import json
import sys
import warnings
from typing import Any


def main(rank: int, world: int, file: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import te_inductor
    from te_inductor.errors import StateError
    from te_inductor.recipes import DelayedScaling

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    how: Any = {"backend": "te", "options": {"recipe": DelayedScaling(amax_history_len=4), "fallback": "error"}}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    class Head(nn.Module):  # of the root's group
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x):
            return self.proj(x)

    def sharded(compiled: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), Head())
        for block in model if compiled == "blocks" else ():
            block.compile(**how)
        for block in model[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, model if compiled == "blocks" else torch.compile(model, **how)

    def train(run: Any, steps: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        losses = []
        for _ in range(steps):
            loss = run(torch.randn(8, 32)).square().sum()
            loss.backward()
            losses.append(loss.item())
        return losses

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)

    found: dict[str, Any] = {}
    for compiled in ("whole", "blocks"):
        model, run = sharded(compiled)
        train(run, 2, seed=rank)
        state = te_inductor.state_dict(model)
        told: dict[str, Any] = {"keys": [key for key in state if key.endswith("scale")]}
        told["of a part"] = list(te_inductor.state_dict(model[0].up))
        told["trained"] = all(value != 1 for key, value in state.items() if key.endswith("scale"))

        before, run_before = sharded(compiled)  # no call yet
        told["loaded"] = list(te_inductor.load_state_dict(before, state))
        told["waits"] = same(te_inductor.state_dict(before), state)
        after, run_after = sharded(compiled)
        train(run_after, 1, seed=7)
        te_inductor.load_state_dict(after, state)
        told["in place"] = same(te_inductor.state_dict(after), state)
        losses = [train(one, 2, seed=rank + 9) for one in (run, run_before, run_after)]
        told["losses"] = losses[0] == losses[1] == losses[2]
        states = [te_inductor.state_dict(one) for one in (model, before, after)]
        told["states"] = same(states[0], states[1]) and same(states[0], states[2])
        told["moved on"] = not same(states[0], state)

        resumed, run_resumed = sharded(compiled)  # with an optimizer's state, and without ours
        optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
        for parameter in resumed.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                train(run_resumed, 1, seed=rank)
                optimizer.step()
        told["lost state is said"] = sum("trained before" in str(one.message) for one in caught) == 1
        found[compiled] = told

    with_lost = sharded("blocks")[0]
    with_lost.extra = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.randn(8, 8), mesh))
    try:
        te_inductor.state_dict(with_lost)
    except StateError as error:
        found["lost"] = str(error)
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from tests import uncompiled

    with uncompiled.patched(sys.argv[4:] == ["uncompiled"]):
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
