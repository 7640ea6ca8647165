"""Weight gradients added to main_grad, on the GPU: the fp32 sums of an fp32 model's `grad`, also in CUDA graphs and
where CUTLASS adds."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import explain
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels.problem import OUTPUT
from tests.support.gpu_main_grads import te
from tests.support.kernels import dense


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


class Tied(nn.Module):
    """Two layers that are one GEMM, and whose totals are two; a third that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.a, self.b, self.c = (nn.Linear(2048, 2048, **made) for _ in range(3))

    def forward(self, x):
        return self.c(nn.functional.silu(self.a(x)) * self.c(self.b(x)))


KNOWN = dense(2048, 2048, 2048, "tensor", False, ("e5m2", "e4m3"), torch.float32, added=OUTPUT)


def totals(model, recipe, mode, batches) -> list[torch.Tensor]:
    """What training steps leave in main_grad."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    for p in matrices:
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    sites = explain(model, batches[0][0], options={"policy": {"*": recipe}, "wgrad": "main_grad"}).sites
    kernels = {site.kernel.partition(":")[0] for site in sites if site.gemm == "wgrad"}
    assert kernels == {"cublaslt" if tables.choose(KNOWN) is None else "cutlass"}
    run = te(model, recipe, mode=mode, wgrad="main_grad")
    for x, dy in batches:
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = None
        run(x).backward(dy)
        assert all(p.grad is None for p in matrices)
        for p in model.parameters():
            p.grad = None
    return [p.main_grad for p in matrices]


@pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_cutlass_adds(recipe, mode, no_caches):
    """CUTLASS leaves what cuBLASLt and a kernel behind it leave, but for the order of sums and accumulation in 14
    bits."""
    counters.clear()
    model, choose = Tied(), tables.choose
    batches = [[torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(5)]
    for x, _ in batches:
        x.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mine = totals(model, recipe, mode, batches)
    assert any(
        "cutlass" in event.key and "_ao_" in event.key for event in profile.key_averages()
    )  # quack's add_to_output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "choose", lambda p: None if p.epilogue.added == OUTPUT else choose(p))
        theirs = totals(model, recipe, mode, batches)
    for ours, other in zip(mine, theirs, strict=True):
        assert (ours.double() - other.double()).norm() / other.double().norm() < 2.0**-8
    assert mode == "default" or counters["inductor"]["cudagraph_skips"] == 0
