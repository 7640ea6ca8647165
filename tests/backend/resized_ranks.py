"""A case of a model whose training goes on with another number of ranks, for test_resized.py."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import te_inductor
from te_inductor.errors import FallbackWarning
from te_inductor.recipes import DelayedScaling
from tests.ranks import Rank
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


def trains(rank: Rank, folder: str, kind: str, steps: str) -> Any:
    """Trains by delayed scaling from the checkpoint in the folder, if there is one, and leaves one there: the model's by
    DCP, and te_inductor's beside it. All ranks together see the same rows at a step, whatever their number. Tells the
    losses, the state that was loaded and the state behind the last step."""
    warnings.simplefilter("error", FallbackWarning)
    world, mesh = rank.world, rank.mesh
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
    for step in range(begun, begun + int(steps)):
        torch.manual_seed(step)
        x = torch.randn(ROWS, K).chunk(world)[rank.rank]
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
    saved = {"model": model.state_dict(), "steps": begun + int(steps), "te": state}
    dcp.save(saved, checkpoint_id=str(Path(folder, "model")))
    if rank.rank == 0:
        torch.save(state, Path(folder, "te"))
    dist.barrier()
    return {"losses": losses, "loaded": loaded, "state": numbers(state)}
