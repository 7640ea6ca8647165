"""Sizes, tolerances, layers and comparisons of tests on a GPU."""

import torch
from torch import nn

import te_inductor
from tests.oracle import casts


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


SIZES = [(1, 1), (3, 17), (33, 70), (128, 64), (256, 384), (257, 1040), (64, 4096)]


FAST_BITS = (
    13  # Hopper's fast accumulation keeps at least this many bits of each partial sum (DeepSeek-V3, section 3.5.2)
)


def same(kept, expected) -> bool:
    """Bit for bit, but for which NaN a NaN is: the CPU keeps its sign."""
    if not torch.equal(kept.digests.cpu(), expected.digests):
        return False
    pairs = zip(kept.tensors, expected.tensors, strict=True)
    return all(_bits(a.cpu()).equal(_bits(b)) for a, b in pairs)


def _bits(x):
    return (
        torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8)) if x.element_size() == 1 else x.nan_to_num(nan=-1.0)
    )


def ema(model) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(512), nn.Linear(512, 2048), nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def layer(recipe: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = Mlp().to("cuda", torch.bfloat16).requires_grad_(False)
    te_inductor.quantize_(model, recipe)
    return model, torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)


def check_linear(m, n, k, dtype, recipe, options, bound, *seeds) -> None:
    """Holds a compiled layer's output and gradients to the oracle's. Nothing fuses in front of the layer, so its casts see
    the oracle's values."""
    torch._dynamo.reset()
    layer = nn.Linear(k, n, device="cuda", dtype=dtype)
    x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=dtype)
    compiled = torch.compile(layer, backend="te", options=options, fullgraph=True)
    for _ in range(3):  # CUDA graphs: warm-up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        layer.zero_grad()
        x.grad = None
        y = compiled(x)
        y.backward(dy)
    weight, bias = layer.weight.detach().cpu(), layer.bias.detach().cpu()
    expected = casts.linear(x.detach().cpu(), weight, bias, recipe, dy.cpu(), *seeds)
    results = (y, x.grad, layer.weight.grad, layer.bias.grad)
    for name, actual, wanted in zip("y dx dw db".split(), results, expected, strict=True):
        assert actual.dtype == dtype and relative(actual.detach(), wanted) < bound, (name, dtype, m, n, k)
