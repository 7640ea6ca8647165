"""CUTLASS's GEMM kernels against a float64 product, and inside compiled training steps."""

import dataclasses

import pytest
import torch
from torch import nn

from te_inductor import explain
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels import cutlass_tiles as template
from te_inductor.kernels.problem import ANOTHER, NOTHING
from te_inductor.recipes import Float8CurrentScaling, Gemm, QParams
from te_inductor.templates.cutlass import build, launch
from tests.support.blocked_scales import E4M3, E5M2, blocked, spread
from tests.support.gpu_ops import FAST_BITS
from tests.support.kernels import dense as problem_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed"),
]
TILES = [(tile, True) for tile in template.FAST_TILES] + [(tile, False) for tile in template.SPLIT_TILES]


@pytest.mark.parametrize("scope", ["tensor", "row"])
@pytest.mark.parametrize(("tile", "fast"), TILES, ids=str)
def test_a_product_is_that_of_float64(tile, fast, scope):
    """Sizes that no tile divides. Each step of the tensor core, over 32 elements of K, keeps `FAST_BITS` bits of its
    partial sum; split accumulation sums 4 steps so, and adds in fp32. The output's rounding is 2**-9."""
    m, n, k = 3 * tile.m * tile.cluster_m - 40, 2 * tile.n * tile.cluster_n - 48, 528
    a, b = (torch.randn(rows, k, device="cuda").mul_(4) for rows in (m, n))
    a, b = a.to(E4M3 if fast else E5M2), b.to(E4M3)
    elements = ("e4m3" if fast else "e5m2", "e4m3")
    shapes = ((m, 1), (1, n)) if scope == "row" else ((), ())
    scales = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes]
    bias, other = (torch.randn(*size, device="cuda").mul_(100).bfloat16() for size in ((n,), (m, n)))
    problems = [
        problem_of(m, n, k, scope, fast, elements, bias=with_bias, added=added)
        for with_bias, added in (
            (False, NOTHING),
            (True, NOTHING),
            (scope == "row", ANOTHER),
        )
    ]
    build.start(template.kernel(problem, tile) for problem in problems)
    for problem in problems:
        rest = [bias] * problem.epilogue.bias + [other] * (problem.epilogue.added == ANOTHER)
        assert template.supports(tile, problem)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        given = {
            "tile": tile.shape,
            "arch": "90",
            "scope": scope,
            "fast_accum": fast,
            "added": problem.epilogue.added,
            "out": out,
        }
        launch.scaled_mm(a, b.t(), *scales, *rest, **given)
        exact = (a.double() @ b.double().t()) * scales[0].double() * scales[1].double()
        absolute = (a.double().abs() @ b.double().abs().t()) * scales[0].double() * scales[1].double()
        for term in rest:
            exact, absolute = exact + term.double(), absolute + term.double().abs()
        steps = k / 32 if fast else 4
        bound = absolute * steps * 2.0**-FAST_BITS + exact.abs() * 2.0**-8
        excess = ((out.double() - exact).abs() / bound).max()
        assert excess <= 1


@pytest.mark.parametrize("scope", ["1x128", "128x128"])
@pytest.mark.parametrize("tile", template.BLOCK_TILES, ids=str)
@pytest.mark.parametrize("added", [NOTHING, ANOTHER])
@pytest.mark.parametrize("sizes", [(652, 400, 640), (2050, 1040, 256), (300, 272, 1168), (8448, 4096, 384)], ids=str)
def test_a_product_with_scales_of_blocks_is_that_of_float64(sizes, added, tile, scope):
    """Four steps of the tensor core a block of K, whose sum is scaled in fp32; sizes that no tile and no block divides,
    and one that gives a thread block several tiles. What is added may have numbers of any size in its place, and no
    other."""
    m, n, k = sizes
    a, b, a_scale, b_scale = blocked(m, n, k, scope)
    wide_a, wide_b = a.double() * spread(a_scale, m, k), b.double() * spread(b_scale.t(), n, k)
    exact, absolute = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
    dtype = torch.float16 if scope == "1x128" and added == ANOTHER else torch.bfloat16
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    given = {"tile": tile.shape, "arch": "90", "scope": scope, "fast_accum": False, "added": added}
    rest = []
    if added == ANOTHER:
        if dtype == torch.float16:  # which sums of these scales overflow
            a_scale = a_scale / absolute.max().float()
            exact, absolute = exact / absolute.max(), absolute / absolute.max()
        rest = [(torch.randn(m, n, device="cuda") * absolute.mean() * 4).to(dtype)]
        exact, absolute = exact + rest[0].double(), absolute + rest[0].double().abs()
    launch.scaled_mm(a, b.t(), a_scale, b_scale, *rest, **given, out=out)
    steps = 4 * 2.0**-FAST_BITS + (-(-k // 128) + len(rest)) * 2.0**-23
    rounding, least = (2.0**-11, 2.0**-25) if dtype == torch.float16 else (2.0**-8, 0.0)
    bound = absolute * steps + exact.abs() * rounding + least
    assert ((out.double() - exact).abs() <= bound).all()
    a[3] = float("nan")
    if rest:
        rest[0][5] = float("inf")
    launch.scaled_mm(a, b.t(), a_scale, b_scale, *rest, **given, out=out)
    assert out[3].isnan().all() and not out[:3].isnan().any() and not out[4:].isnan().any()
    assert not rest or (out[5].isinf().all() and out.isinf().sum() == n)


@pytest.mark.parametrize("added", [NOTHING, ANOTHER])
@pytest.mark.parametrize("tile", template.BLOCK_TILES, ids=str)
def test_a_product_with_scales_of_blocks_is_the_same_each_time(tile, added):
    """What is loaded ahead overwrites nothing that is still read: no matter who is late, the sums are the same bits."""
    m, n, k = 16384, 4096, 4096
    a, b, a_scale, b_scale = blocked(m, n, k, "128x128")
    rest = [torch.randn(m, n, device="cuda", dtype=torch.bfloat16)] if added == ANOTHER else []
    given = {"tile": tile.shape, "arch": "90", "scope": "128x128", "fast_accum": False, "added": added}
    first, wrong = None, torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(200):
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        launch.scaled_mm(a, b.t(), a_scale, b_scale, *rest, **given, out=out)
        first = out if first is None else first
        wrong += (out != first).sum()
    assert wrong == 0


@pytest.mark.parametrize("scope", ["tensor", "row"])
@pytest.mark.parametrize("tile", template.SPLIT_TILES, ids=str)
def test_a_sum_is_that_of_float64(tile, scope):
    """The sum is in place, at sizes that no tile divides, with nothing written around: the product is rounded to fp32,
    then the sum. Rows of NaN and of infinities in the total stay; small integers add up exactly."""
    m, n, k = 3 * tile.m * tile.cluster_m - 40, 2 * tile.n * tile.cluster_n - 48, 528
    gemm = Gemm("wgrad", False, (scope, scope))
    buffer = torch.full((m * n + 64,), 7.0, device="cuda")
    total = buffer[32:-32].view(m, n)
    a, b = (torch.randn(rows, k, device="cuda").mul_(4) for rows in (m, n))
    a, b = a.to(E5M2), b.to(E4M3)
    shapes = ((m, 1), (n, 1)) if scope == "row" else ((), ())
    scales = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes]
    total.normal_(std=100)
    total[3], total[5], total[7, ::2] = float("nan"), float("inf"), float("-inf")
    before, call = total.double(), launch.add_scaled_mm
    call(total, a, scales[0], b, scales[1], gemm, tile, "90")
    call(total, a, scales[0], b, scales[1], gemm, tile, "90")
    scale = scales[0].double() * scales[1].double().t()
    exact = before + 2 * (a.double() @ b.double().t()) * scale
    absolute = (a.double().abs() @ b.double().abs().t()) * scale
    bound = 2 * absolute * 4 * 2.0**-FAST_BITS + 4 * 2.0**-24 * (before.abs() + 2 * absolute)
    finite = exact.isfinite()
    assert ((total.double() - exact).abs() <= bound)[finite].all()
    assert torch.equal(total.double()[~finite].nan_to_num(1.0), exact[~finite].nan_to_num(1.0))
    assert (buffer[:32] == 7).all() and (buffer[-32:] == 7).all()
    total.fill_(3.0)
    a, b = (torch.randint(-4, 5, (rows, k), device="cuda") for rows in (m, n))
    one = [torch.ones_like(each) for each in scales]
    call(total, a.to(E5M2), one[0], b.to(E4M3), one[1], gemm, tile, "90")
    assert torch.equal(total.double(), 3 + a.double() @ b.double().t())


@pytest.mark.parametrize("value", [float("nan"), 448.0, 0.0, 2.0**-9])
def test_special_values_reach_their_row_and_no_other(value):
    tile = template.FAST_TILES[0]
    a, b = torch.randn(512, 256, device="cuda").to(E4M3), torch.randn(512, 256, device="cuda").to(E4M3)
    a[3] = value
    one = torch.ones((), device="cuda")
    out = torch.full((512, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    shape = dataclasses.astuple(tile)
    launch.scaled_mm(a, b.t(), one, one, tile=shape, arch="90", scope="tensor", fast_accum=True, out=out)
    exact = a.double() @ b.double().t()
    bound = (a.double().abs() @ b.double().abs().t()) * 8 * 2.0**-FAST_BITS + exact.abs() * 2.0**-8
    assert (out.isnan() == exact.isnan()).all()
    assert ((out.double() - exact).abs() <= bound)[~exact.isnan()].all()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block"])
def test_a_training_step_runs_on_it(recipe, mode, no_caches):
    """The shape is a measured one: the report names the tile, the profile shows the kernel, values are those of
    cuBLASLt."""
    torch.manual_seed(0)
    layer = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    options = {"recipe": recipe, "mode": mode}
    names = {site.gemm: site.kernel for site in explain(layer, x, options=options).sites}
    assert names["wgrad" if recipe == "block" else "fprop"].startswith("cutlass:"), names

    def results() -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="te", fullgraph=True, options=options)
        for _ in range(3):  # of which the last replays, if there is a CUDA graph
            torch.compiler.cudagraph_mark_step_begin()
            x.grad = None
            layer.zero_grad()  # gradients lie in the graph's memory: none may live into the next step
            y = compiled(x)
            kept = y.detach().clone()
            y.backward(dy)
            found = [kept, x.grad.clone(), layer.weight.grad.clone()]
        return found

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mine = results()
    assert any("cutlass" in event.key and "Gemm" in event.key for event in profile.key_averages())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "choose", lambda *_: None)
        theirs = results()
    for ours, other in zip(mine, theirs, strict=True):
        # The same fp8 operands in another order of summation: a rounding of bf16, and what accumulation in 14 bits
        # adds.
        difference = (ours.double() - other.double()).norm() / other.double().norm()
        assert difference < 2.0**-8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm, self.layer = nn.RMSNorm(4096, **made), nn.Linear(4096, 4096, **made)

    def forward(self, x):
        h = x + self.layer(self.norm(x))
        return h + self.norm(h)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_residual_is_read_by_the_gemm(training, no_caches):
    """Its result differs by roundings to bf16: the layer's output is not rounded, and the norm reads the rounded sum.
    The gradient's scale is a power of two, or such a rounding of its amax would move every step of its cast."""
    torch.manual_seed(0)
    recipe = Float8CurrentScaling(fp8_quant_bwd_grad=QParams(power_2_scale=True))
    model = Residual()
    x = torch.randn(4, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    dy, choose = torch.randn_like(x), tables.choose

    def result() -> list[torch.Tensor]:
        torch._dynamo.reset()
        x.grad = None
        with torch.set_grad_enabled(training):
            y = torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe})(x)
        if training:
            y.backward(dy)
        return [y.detach(), x.grad] if training else [y]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mine = result()
    assert any("scaled_bias_added" in event.key for event in profile.key_averages())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "choose", lambda p: None if p.epilogue.added == ANOTHER else choose(p))
        theirs = result()
    for name, ours, other in zip(("y", "dx"), mine, theirs, strict=False):
        assert (ours.double() - other.double()).norm() / other.double().norm() < 2.0**-7, name
