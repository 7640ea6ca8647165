"""Cases of FP8 between two GPUs over NCCL, for test_wire.py: "graph_fsdp", a model that gathers its own weights, and
"experts", expert parallelism."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import te_inductor
from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.decide import between_ranks
from tests.backend.expert_parallel_ranks import HIDDEN, MoE
from tests.backend.graph_fsdp_ranks import MIXED
from tests.ranks import Rank
from tests.simple_fsdp import simple_fsdp

WIDTH, ROWS = 2048, 4096


def graph_fsdp(rank: int, world: int) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    simple_fsdp(model, init_device_mesh("cuda", (world,)), [Shard(0)], **MIXED)
    torch.manual_seed(1 + rank)
    return model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)


def experts(rank: int, world: int) -> tuple[nn.Module, Tensor]:
    model = MoE(world, rank)
    torch.manual_seed(1 + rank)
    return model, torch.randn(512, HIDDEN)


def train(kind: str, rank: int, world: int, options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = (graph_fsdp if kind == "graph_fsdp" else experts)(rank, world)
    run: Any = model if options is None else torch.compile(model, backend="te", options=options)
    given = x.clone().requires_grad_()
    for _ in range(3):
        model.zero_grad()
        given.grad = None
        y = run(given)
        y.float().square().mean().backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [tensor.float() for tensor in (y.detach(), given.grad, *grads)]


def trains(rank: Rank, kind: str, recipe: str) -> Any:
    """How far outputs and gradients are from high precision, with FP8 between ranks and with bf16, and what `explain` says
    of the wire."""
    torch.set_default_device(torch.device("cuda", rank.rank))
    options = {"policy": {"*": recipe, "gate": "none"}, "recipe": "none", "fallback": "warn"}
    options |= {"amax_group": dist.group.WORLD} if kind == "experts" else {}
    refused = Refusal("of the test")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        low = train(kind, rank.rank, rank.world, options)
        model, x = (graph_fsdp if kind == "graph_fsdp" else experts)(rank.rank, rank.world)
        wires = [site.wire for site in te_inductor.explain(model, x, options=options).sites if site.wire]
        with (
            mock.patch.object(between_ranks, "_why_not_gathered", lambda *_: refused),
            mock.patch.object(between_ranks, "_why_not_exchanged", lambda *_: refused),
        ):
            high = train(kind, rank.rank, rank.world, options)
        right = train(kind, rank.rank, rank.world, None)
    off = [[((a - b).norm() / b.norm()).item() for a, b in zip(one, right, strict=True)] for one in (low, high)]
    return {"error": off[0], "error in bf16": off[1], "wires": wires}
