"""One rank of a model whose training goes on with another number of ranks:
`python -m tests.backend.resized_ranks RANK WORLD FILE FOLDER KIND STEPS`.

Trains by delayed scaling from the checkpoint in FOLDER, if there is one, and leaves one there: the model's by DCP, and
te_inductor's beside it. All ranks together see the same rows at a step, whatever their number. Prints one line of JSON:
losses, the state that was loaded and the state behind the last step."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import te_inductor
from te_inductor import compat
from te_inductor.errors import FallbackWarning
from te_inductor.recipes import DelayedScaling
from tests import uncompiled
from tests.simple_fsdp import simple_fsdp

K, N, ROWS = 64, 128, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(K), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def numbers(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


def main(rank: int, world: int, file: str, folder: str, kind: str, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Model()
    if kind == "graph":
        simple_fsdp(model, mesh, [Shard(0)])
    else:
        fully_shard(model, mesh=mesh)
    begun, loaded = 0, {}
    if Path(folder, "model").exists():
        state = {"model": model.state_dict(), "steps": 0, "te": {}}
        saved = torch.load(Path(folder, "te"))
        state["te"] = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
        dcp.load(state, checkpoint_id=str(Path(folder, "model")))
        assert all(torch.equal(tensor, saved[name]) for name, tensor in state["te"].items())
        model.load_state_dict(state["model"])
        te_inductor.load_state_dict(model, state["te"])
        begun, loaded = state["steps"], numbers(te_inductor.state_dict(model))
    options = {"recipe": DelayedScaling(amax_history_len=8), "fallback": "warn"}
    run = torch.compile(model, backend="te", options=options)
    losses = []
    for step in range(begun, begun + steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS, K).chunk(world)[rank]
        loss = run(x).square().sum() / (ROWS if kind == "graph" else ROWS / world)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.02 * parameter.grad
                parameter.grad = None
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / (1 if kind == "graph" else world))
    state = te_inductor.state_dict(model)
    assert state  # layers ran in low precision
    dcp.save(
        {"model": model.state_dict(), "steps": begun + steps, "te": state}, checkpoint_id=str(Path(folder, "model"))
    )
    if rank == 0:
        torch.save(state, Path(folder, "te"))
    dist.barrier()
    print(json.dumps({"losses": losses, "loaded": loaded, "state": numbers(state)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with mock.patch.object(compat, "compile_fx", uncompiled.compile_fx), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6]))  # type: ignore[arg-type]
