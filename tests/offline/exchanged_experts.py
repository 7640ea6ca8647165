"""Experts whose rows come from two ranks, as `cases.py` has other models: how many rows come is known at run time alone."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.expert_blocks import Experts, ExpertShape
from tests.offline.cases import Case

DIM, TOKENS = 2048, 8192  # Qwen3-30B-A3B's, with a choice of eight experts a token


class Layer(nn.Module):
    """A norm in front, a residual around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(DIM), Experts(ExpertShape(dim=DIM), world=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


def _case(recipe: str) -> Case:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.config.capture_scalar_outputs = True
    torch.set_default_dtype(torch.bfloat16)  # a module of fake tensors cannot be cast
    with torch.device("cuda"):
        layer, x = Layer(), torch.randn(TOKENS, DIM, requires_grad=True)
    torch.set_default_dtype(torch.float32)
    options = {"policy": {"*router": "none", "*": recipe}, "amax_group": dist.group.WORLD}
    return torch.compile(layer, backend="te", fullgraph=True, options=options), (x,)


def exchanged_delayed() -> Case:
    return _case("delayed")


def exchanged_current() -> Case:
    return _case("current")
