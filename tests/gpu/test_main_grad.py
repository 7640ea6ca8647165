"""Weight gradients added to main_grad, on the GPU: the fp32 sums of an fp32 model's `grad`, also in CUDA graphs."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters


def te(model, recipe, **options):
    options = {"policy": {"*": recipe}, "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block"])
def test_microbatches_add_up(recipe, mode):
    counters.clear()
    twin = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    model = copy.deepcopy(twin)
    totals = {p: torch.zeros_like(p) for p in model.parameters() if p.dim() == 2}
    for p, total in totals.items():
        p.main_grad = total
    run, plain = te(model, recipe, mode=mode, wgrad="main_grad"), te(twin, recipe, mode=mode)
    expected = [torch.zeros_like(p) for p in twin.parameters() if p.dim() == 2]
    for _ in range(6):
        x, dy = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
        for each in (run, plain):
            torch.compiler.cudagraph_mark_step_begin()
            for p in (*model.parameters(), *twin.parameters()):
                p.grad = None
            each(x).backward(dy)
        for total, p in zip(expected, (p for p in twin.parameters() if p.dim() == 2), strict=True):
            total += p.grad
    for (p, total), other in zip(totals.items(), expected, strict=True):
        assert p.grad is None and torch.equal(total, other)
    assert mode == "default" or counters["inductor"]["cudagraph_skips"] == 0
