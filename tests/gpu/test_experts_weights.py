"""Copies of experts on a GPU: of weights, made with the scales of columns in passing, and kept between calls; of groups,
from one read. Bit for bit what the CPU makes, and what casting at each call computes."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from te_inductor import ops
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import grouped
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_weights import FreshnessCheck, Spec, new
from te_inductor.templates.triton import group_strips, grouped_casts
from te_inductor.templates.triton.cached_weights import OnDevice
from tests.support.contents import CONTENTS
from tests.support.gpu_experts import RECIPES, Experts, compiled, inputs, step
from tests.support.gpu_ops import _bits, ema, same

SHAPES = [(3, 48, 80), (2, 130, 768), (2, 40, 2880), (1, 33, 14336), (2, 8, 20000)]
KEPT = [Quantizer("e4m3"), Quantizer("e4m3", scope="row"), Quantizer("e4m3", scope="128x128"),
        Quantizer("e4m3", scope="1x32")]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_with_scales_of_columns(dtype, shape, content):
    """The last size is of more columns than registers hold, and is read twice."""
    w = CONTENTS[content](shape[0] * shape[1], shape[2]).to(dtype).view(shape)
    for quantizer in (Quantizer("e4m3", scope="row"), Quantizer("e5m2", scope="row", power_2_scale=True)):
        found = ops.quantize_experts_rows(w.cuda(), quantizer)
        expected = grouped.quantize_experts_rows(w, quantizer)
        columns = ops.quantize_experts_delayed(w.cuda(), found[2], quantizer, True)
        again = grouped.quantize_experts(w, quantizer, None, True)
        for one, other in zip((*found, columns, found[3]), (*expected, *again), strict=True):
            assert torch.equal(_bits(one.cpu()), _bits(other)), quantizer


@pytest.mark.parametrize("sizes", [(0, 7, 0, 128, 155), (0, 0, 300, 0), (1,) * 40], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_columns_of_groups(dtype, sizes):
    """Columns are cast in one read and in two, of rows that are gathered; what is written behind all groups too."""
    starts, tiles, source = grouped.layout(torch.tensor(sizes).cumsum(0).int(), sum(sizes))
    picked = torch.where(source >= 0, torch.randint(0, 90, (sum(sizes),))[source.clamp(min=0)], -1).int()
    x = torch.randn(90, 1096).to(dtype)
    x[3, 5], x[4, 6], x[5] = torch.nan, torch.inf, 0.0
    for quantizer in (Quantizer("e4m3", scope="row"), Quantizer("e5m2", scope="row", power_2_scale=True)):
        expected = grouped.quantize_groups(x, picked, tiles, starts, quantizer)
        given = x.cuda(), picked.cuda()
        once = group_strips.quantize_groups_by_column(*given, starts.cuda(), quantizer)
        twice = grouped_casts.quantize_groups(*given, tiles.cuda(), starts.cuda(), quantizer)
        for found in (once, twice):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(_bits(one.cpu()), _bits(other)), quantizer


@pytest.mark.parametrize("quantizer", KEPT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kept_copies(dtype, quantizer):
    """Copies are those of several weights at once, both orders; then of one expert that has changed."""
    weights = [[torch.randn(shape).to(dtype)] for shape in ((3, 48, 80), (8, 256, 128), (2, 200, 72))]
    on_gpu = [[w.cuda() for w in group] for group in weights]
    specs = [Spec(quantizer, place == 1, 1) for place in range(len(weights))]
    kept, expected = ([new(*pair) for pair in zip(specs, given, strict=True)] for given in (on_gpu, weights))
    for one in (*kept, *expected):
        one.want_columns()
    look = OnDevice()
    for _ in range(3):
        look(list(map(FreshnessCheck, kept, on_gpu)))
        cached_weights.refresh(list(map(FreshnessCheck, expected, weights)))
        for one, other in zip(kept, expected, strict=True):
            assert same(one, other), one.sizes
        for group in (*on_gpu, *weights):
            group[0][-1, 3, 5] += 3.0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_programs(recipe, mode):
    """Two microbatches a step, weights that change behind them, other groups each time."""
    counters.clear()
    models = [Experts()]
    models.append(copy.deepcopy(models[0]))
    runs = [
        compiled(model, recipe, mode=mode, weights=weights, fallback="error")
        for model, weights in zip(models, ("once", "each_call"), strict=True)
    ]
    for kind in ("all", "some", "one"):
        for _ in range(2):
            given = inputs(kind)
            dy = torch.randn_like(given[0])
            found = []
            for run, model in zip(runs, models, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                found.append(step(run, model, *given, dy))
            for one, other in zip(*found, strict=True):
                assert torch.equal(one, other), kind
        for model in models:
            ema(model)
    assert mode == "default" or counters["inductor"]["cudagraph_skips"] == 0
