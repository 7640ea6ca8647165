"""Weights that are cast once, on the GPU: kernels bit for bit, changes in programs, CUDA graphs, streams, the
profile."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from te_inductor.recipes import NVFP4BlockScaling
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_weights import FreshnessCheck, Spec, new
from te_inductor.templates.triton.cached_weights import OnDevice
from tests.offline.cached_weights_kernels import QUANTIZERS
from tests.support.contents import CONTENTS
from tests.support.gpu_ops import ema, same

SHAPES = [(48, 80), (30, 136), (200, 8), (20, 1092), (512, 4096)]
ODD = (33, 131)  # of whose elements the first is at an odd address


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("odd", [False, True], ids=["", "odd"])
def test_copies(odd, dtype, quantizer, content):
    """All weights at once, both orders, against the eager look on the CPU."""
    shapes = [ODD, *SHAPES[:2]] if odd else [*SHAPES[:3], *SHAPES[4:]]
    weights = [[CONTENTS[content](*shape).to(dtype)] for shape in shapes]
    specs = [Spec(quantizer, i % 2 == 1, 1) for i in range(len(weights))]
    on_gpu = [[w.cuda() for w in group] for group in weights]
    if odd:
        on_gpu[0] = [torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape) for w in on_gpu[0]]
    kept, expected = ([new(*pair) for pair in zip(specs, given, strict=True)] for given in (on_gpu, weights))
    for one in (*kept, *expected):
        one.want_columns()
    look = OnDevice()
    for _ in range(3):
        look(list(map(FreshnessCheck, kept, on_gpu)))
        cached_weights.refresh(list(map(FreshnessCheck, expected, weights)))
        for one, other, shape in zip(kept, expected, shapes, strict=True):
            assert same(one, other), shape
        for group, other in zip(on_gpu, weights, strict=True):
            for tensors in (group, other):
                tensors[0][-1, -1] += 3.0


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()


def te(model, recipe="current", **options):
    emulated = recipe not in ("current", "delayed", "rowwise", "block")
    options = {"policy": {"*": recipe}, "fallback": "silent" if emulated else "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def no_grad(model) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1


def adam(model) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


RECIPES = ["current", "delayed", "rowwise", "block", "mxfp8", NVFP4BlockScaling(disable_stochastic_rounding=True)]


@pytest.mark.parametrize(("recipe", "mode"), list(itertools.product(RECIPES, ["default", "reduce-overhead"])), ids=str)
@pytest.mark.parametrize("microbatches", [3, 1])
def test_programs(recipe, mode, microbatches):
    """Bit for bit what casts at each call give: the same scales, the same values, the same GEMMs."""
    counters.clear()
    models = [mlp()]
    models.append(copy.deepcopy(models[0]))
    runs = [te(m, recipe, mode=mode, weights=w) for m, w in zip(models, ("once", "each_call"), strict=True)]
    for step, change in enumerate((ema, no_grad, adam, ema, ema)):
        for model in models:
            model.zero_grad()
        for microbatch in range(microbatches):
            x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
            outs = []
            for model, run in zip(models, runs, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                y = run(x)
                y.float().square().sum().backward()
                for p in model.parameters():
                    p.grad = p.grad.clone()  # and no memory of a CUDA graph, which the next replay writes
                outs.append([y.detach().clone(), *(p.grad for p in model.parameters())])
                del y
            for a, b in zip(*outs, strict=True):
                assert torch.equal(a, b), (step, microbatch)
        for model in models:
            change(model)
    assert mode == "default" or counters["inductor"]["cudagraph_skips"] == 0


def test_captured_whole():
    """The look is part of a CUDA graph that the user records: replays see what has changed."""
    model = mlp()
    twin = copy.deepcopy(model)
    run, plain = te(model, weights="once"), te(twin, weights="each_call")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        for _ in range(3):
            graph.replay()
            assert torch.equal(y, plain(x))
            ema(model), ema(twin)


def test_streams():
    """A look on another stream waits for casts that may not be done."""
    layer = nn.Linear(4096, 8192).cuda().bfloat16()
    twin = copy.deepcopy(layer)
    run, plain = te(layer, weights="once"), te(twin, weights="each_call")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        run(x)
        streams = [torch.cuda.Stream() for _ in range(3)]
        for _ in range(5):
            ema(layer), ema(twin)
            expected = plain(x)
            torch.cuda.synchronize()
            found = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(run(x))
            torch.cuda.synchronize()
            assert all(torch.equal(y, expected) for y in found)


def test_profile():
    """A weight that has not changed is read once and not cast: the second of two casts takes next to no time."""
    layer = nn.Linear(8192, 8192, bias=False).cuda().bfloat16()
    run = te(layer, weights="once")
    x = torch.randn(256, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run(x).sum().backward()
    adam(layer)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(x)
        run(x)
        torch.cuda.synchronize()
    times = {}
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if "cached_weights_" in event.name:
            times.setdefault(event.name, []).append(event.device_time)
    [(first, second)] = [times[name] for name in times if "cast" in name]
    assert second < 0.2 * first
    [scans] = [times[name] for name in times if "scan" in name]
    assert len(scans) == 2
