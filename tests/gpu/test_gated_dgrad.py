"""The GEMM that makes both copies of a gated activation's gradients: against float64, bit for bit where nothing is
rounded, and in a compiled training step."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_inductor.command.gemm_arms import SWIGLU
from te_inductor.fused import gated_dgrad
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tiles as template
from te_inductor.passes import joint
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.runtime.eager import dense
from te_inductor.templates.cutlass import build, launch
from tests.passes import leave_out
from tests.support.blocked_scales import blocked, spread
from tests.support.gpu_ops import FAST_BITS
from tests.support.kernels import dense as product_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DGRAD = Gemm("dgrad", False, ("1x128", "128x128"))
SIZES = [(256, 128, 128), (512, 384, 640), (768, 1024, 128), (1536, 1280, 256), (16384, 2048, 1024)]


def run(a, a_scale, b, b_scale, gate, up, quantizer, tile) -> tuple[Tensor, ...]:
    """Scales as `torch._scaled_mm` has them; what is written was NaN before."""
    poison = torch.full((1 << 28,), 0x7F, device="cuda", dtype=torch.uint8)
    del poison
    scales = a_scale.t().contiguous().flatten(), b_scale.t().contiguous().flatten()
    return launch.gated_gradient(a, scales[0], b, scales[1], gate, up, DGRAD, SWIGLU, quantizer, tile, "90")


def halves(m: int, n: int) -> tuple[Tensor, Tensor]:
    """gate and up as one GEMM writes them."""
    both = torch.randn(m, 2 * n, device="cuda").mul_(2).bfloat16()
    return both[:, :n], both[:, n:]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tile", template.BLOCK_TILES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_copies_are_those_of_float64(sizes, tile, element):
    """A sum is off as `test_cutlass` says, a result by what that makes of it, a few roundings of fp32 and one of bf16,
    a copy by a rounding of FP8. A scale is the power of two that brings its block's largest value to the last
    binade."""
    m, n, k = sizes
    if m % (tile.m * tile.cluster_m) or n % (tile.n * tile.cluster_n):
        pytest.skip("clusters do not divide it")
    quantizer = Quantizer(element, power_2_scale=True, scope="1x128")
    a, b, a_scale, b_scale = blocked(m, n, k, "128x128")
    a_scale, b_scale = a_scale * 2.0**-8, b_scale * 2.0**-8
    gate, up = halves(m, n)
    data, scale_inv, data_t, scale_inv_t = run(a, a_scale, b, b_scale, gate, up, quantizer, tile)
    wide_a, wide_b = a.double() * spread(a_scale, m, k), b.double() * spread(b_scale.t(), n, k)
    d, absolute = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
    off = absolute * (4 * 2.0**-FAST_BITS + (k // 128) * 2.0**-23)
    g, u = gate.double(), up.double()
    sigmoid = g.sigmoid()
    slope = sigmoid * (1 + g * (1 - sigmoid))
    exact = torch.cat((d * u * slope, d * g * sigmoid), 1)
    terms = torch.cat((u.abs() * sigmoid * (1 + g.abs() * (1 - sigmoid)), g.abs() * sigmoid), 1)
    bound = torch.cat((off, off), 1) * terms + (d.abs().repeat(1, 2) * terms) * 2.0**-20
    bound += exact.abs() * 2.0**-8
    for x, error, copy, scales in ((exact, bound, data, scale_inv), (exact.t(), bound.t(), data_t, scale_inv_t)):
        rows, columns = x.shape
        of_blocks = scales.view(columns // 128, rows).t().double()
        top, off_top = (each.abs().reshape(rows, -1, 128).amax(2) for each in (x, error))
        largest = quantizer.format.max
        assert (torch.frexp(of_blocks).mantissa == 0.5).all()
        assert (of_blocks * largest >= top - off_top).all() and (of_blocks * largest < 2 * (top + off_top)).all()
        each = of_blocks.repeat_interleave(128, 1)
        cast = x.abs() * quantizer.format.epsilon / 2 + each * quantizer.format.smallest_step / 2
        assert ((copy.double() * each - x).abs() <= error * 1.1 + cast).all()


@pytest.mark.parametrize("tile", template.BLOCK_TILES, ids=str)
def test_copies_are_eager_s_bit_for_bit(tile):
    """The sums are small integers, gate so large that its sigmoid is 1, and up a power of two: nothing is rounded
    before the casts. Rows and places of NaN, infinities, zeros, huge and tiny numbers."""
    m, n, k = 768 * tile.cluster_m, 640 * tile.cluster_n, 256
    quantizer = Quantizer("e4m3", power_2_scale=True, scope="1x128")
    a, b = (torch.randint(-1, 2, (rows, k), device="cuda").to(E4M3) for rows in (m, n))
    a_scale = torch.randint(0, 2, (2, m), device="cuda").float().exp2().t()
    b_scale = torch.randint(0, 2, (n // 128, 2), device="cuda").float().exp2().t()
    both = torch.cat((torch.full((m, n), 32.0), torch.randint(-3, 4, (m, n)).float().exp2()), 1).cuda().bfloat16()
    both[:, n:] *= torch.randint(0, 2, (m, n), device="cuda") * 2 - 1
    gate, up = both[:, :n], both[:, n:]
    a[3] = 0
    up[5], up[300, 7], up[301, 200], up[302, 201] = float("nan"), float("nan"), float("inf"), float("-inf")
    up[11], up[12], up[400:402] = 2.0**120, -(2.0**-120), 0
    up[256:384, 130], up[512:, 131] = 2.0**100, 0
    results = [run(a, a_scale, b, b_scale, gate, up, quantizer, tile) for _ in range(20)]
    y = (a.double() * spread(a_scale, m, k)) @ (b.double() * spread(b_scale.t(), n, k)).t()
    assert y.abs().max() <= 256
    wide = torch.cat((y * up.double(), y * gate.double()), 1).bfloat16()
    expected = dense.quantize_pieces([wide[:, :n], wide[:, n:]], 1, quantizer)
    for x, *found, of_eager in ((wide, *results[0][:2], expected[:2]), (wide.t(), *results[0][2:], expected[2:])):
        rows, columns = x.shape
        whole = x.isfinite().view(rows, columns // 128, 128).all(2)  # in a block that is not finite all is NaN
        for copy, other, counts in zip(
            found, of_eager, (whole.repeat_interleave(128, 1), whole.t().flatten()), strict=True
        ):
            assert copy.shape == other.shape and torch.equal(copy.float()[counts], other.float()[counts])
        assert found[0].float()[~whole.repeat_interleave(128, 1)].isnan().all() and not whole.all()
    for result in results[1:]:
        assert all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(result, results[0], strict=True)
        )


def test_copies_are_the_same_each_time():
    """What comes behind the operands overwrites nothing that is still read, nor is it overwritten."""
    m, n, k = 16384, 4096, 1024
    quantizer = Quantizer("e4m3", power_2_scale=True, scope="1x128")
    a, b, a_scale, b_scale = blocked(m, n, k, "128x128")
    gate, up = halves(m, n)
    for tile in template.BLOCK_TILES:
        first, wrong = None, torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(60):
            result = run(a, a_scale * 2.0**-8, b, b_scale, gate, up, quantizer, tile)
            first = result if first is None else first
            for x, y in zip(result, first, strict=True):
                wrong += (x.view(torch.uint8) != y.view(torch.uint8)).sum()
        assert wrong == 0, tile


def test_what_runs_where_no_kernel_was_built(monkeypatch):
    """The eager ops: the same but for two roundings to bf16."""
    tile, quantizer = template.BLOCK_TILES[2], Quantizer("e4m3", power_2_scale=True, scope="1x128")
    a, b, a_scale, b_scale = blocked(512, 384, 640, "128x128")
    given = (a, a_scale * 2.0**-8, b, b_scale * 2.0**-8, *halves(512, 384), quantizer, tile)
    mine = run(*given)
    monkeypatch.setattr(launch, "_function", lambda *_: None)
    other = run(*given)
    for (data, scale), (data_2, scale_2) in zip((mine[:2], mine[2:]), (other[:2], other[2:]), strict=True):
        x, y = (dense.dequantize(*each, quantizer, torch.float32) for each in ((data, scale), (data_2, scale_2)))
        assert (x - y).norm() <= 0.03 * y.norm()


def test_every_tile_is_built_at_once():
    """There is a kernel a cluster of one gating."""
    problem = product_of(512, 512, 512, "128x128", False, out=E4M3, gating=SWIGLU)
    kernels = {template.kernel(problem, tile) for tile in template.tiles(problem)}
    assert len(kernels) == len(template.BLOCK_TILES) == len({build._path(kernel) for kernel in kernels})
    assert all(kernel == dataclasses.replace(kernel, gating=(SWIGLU.steps, SWIGLU.results)) for kernel in kernels)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        made = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.gate, self.up = nn.Linear(dim, hidden, **made), nn.Linear(dim, hidden, **made)
        self.down = nn.Linear(hidden, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_a_training_step_runs_on_it(checkpointed, mode, no_caches):
    """Three dimensions of x, at a measured shape: gradients are as far from bf16's as those of separate kernels, and
    nearer to those: what a rounding to bf16 less, of dh, and one more, of its products, move of FP8's."""
    torch.manual_seed(0)
    model = Mlp(2048, 8192)
    x = torch.randn(4, 2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)

    def results(compiled) -> list[Tensor]:
        for _ in range(3):  # of which the last replays, if there is a CUDA graph
            torch.compiler.cudagraph_mark_step_begin()
            x.grad = None
            model.zero_grad()
            compiled(x).backward(dy)
            found = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        return found

    def compiled():
        torch._dynamo.reset()
        options = {"recipe": "block", "weights": "each_call", "mode": mode}
        return torch.compile(run, backend="te", fullgraph=True, options=options)

    step = compiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mine = results(step)
    assert any("GatedGradientGemm" in event.key for event in profile.key_averages())
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, joint, gated_dgrad.fold)
        apart = results(compiled())
    exact = results(model)
    for ours, other, bf16 in zip(mine, apart, exact, strict=True):
        of_ours, of_other = ((each.double() - bf16.double()).norm() / bf16.double().norm() for each in (ours, other))
        assert of_ours <= 1.02 * of_other
        assert (ours.double() - other.double()).norm() / other.double().norm() <= 0.5 * of_other
