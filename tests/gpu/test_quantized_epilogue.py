"""GEMMs that write the FP8 copy of an activation: bit for bit what a GEMM and the generated kernel behind it write."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import ops
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels.cutlass_tiles import NOTHING, QUANTIZED_TILES, kernel_of
from te_inductor.numerics.activation import Activation
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ELEMENTS
from te_inductor.templates.cutlass import build, launch
from tests.support.kernels import dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed"),
]
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
GUARD = 4096  # bytes on each side of an output
ACTIVATIONS = {
    "none": (lambda x: x, ()),
    "relu": (F.relu, (("relu", 0),)),
    "relu2": (lambda x: F.relu(x).square(), (("relu", 0), ("mul", 1, 1))),
    "silu": (F.silu, (("sigmoid", 0), ("mul", 0, 1))),
    "gelu": (F.gelu, (("mul", 0, 0.5), ("mul", 0, 0.5**0.5), ("erf", 2), ("add", 3, 1.0), ("mul", 1, 4))),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        (
            *(("mul", 0, 0), ("mul", 1, 0), ("mul", 2, 0.044715), ("add", 0, 3), ("mul", 4, 0.7978845608028654)),
            *(("mul", 0, 0.5), ("tanh", 5), ("add", 7, 1.0), ("mul", 6, 8)),
        ),
    ),
}


def quantized(a, b, scales, scale, bias, tile, steps, dtype):
    """The kernel's output, in memory that held NaN; around it nothing is written."""
    shape = (a.shape[0], b.shape[0])
    buffer = torch.full((math.prod(shape) + 2 * GUARD,), 0xFF, dtype=torch.uint8, device="cuda")
    out = buffer[GUARD:-GUARD].view(dtype).view(shape)
    given = {"tile": tile.shape, "arch": "90", "scope": "tensor", "fast_accum": True, "steps": steps, "out": out}
    kind = (tile.shape, "90", a.dtype, b.dtype, dtype, "tensor", bias is not None, True, NOTHING, steps)
    assert launch._function(*kind) is not None  # else another one computes it
    launch.quantized_mm(a, b.t(), *scales, scale, *([] if bias is None else [bias]), **given)
    assert (buffer[:GUARD] == 0xFF).all() and (buffer[-GUARD:] == 0xFF).all()
    return out


def rounded(a, b, scales, bias, tile):
    """The same GEMM's output where it writes bf16."""
    out = torch.empty(a.shape[0], b.shape[0], device="cuda", dtype=BF16)
    given = {"tile": tile.shape, "arch": "90", "scope": "tensor", "fast_accum": True, "out": out}
    return launch.scaled_mm(a, b.t(), *scales, *([] if bias is None else [bias]), **given)


def generated(function, element):
    """The cast of y with a scale, by Inductor's kernel."""
    torch._dynamo.reset()
    quantizer = Quantizer(element)
    cast = lambda y, scale: ops.quantize_delayed(function(y), scale, quantizer)  # noqa: E731
    return torch.compile(cast, backend="te", fullgraph=True)


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_bf16_value(name, element):
    """The sum is 0 and the bias what the activation reads: all that there are, NaN, infinities and subnormals too.
    CUDA's erf has other coefficients in the libraries of Triton and of CuTe DSL, both off by at most 2 ulp (CUDA C++
    Programming Guide), less than 2**-18 of a step of FP8: of the 2**16 values few lie that near to where rounding
    turns."""
    function, steps = ACTIVATIONS[name]
    tile, dtype = QUANTIZED_TILES[0], ELEMENTS[element].dtype
    build.start(
        kernel_of(tile, "90", E4M3, E4M3, out, "tensor", True, True, NOTHING, how)
        for out, how in ((dtype, steps), (BF16, None))
    )
    bias = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(BF16)
    a, b = torch.zeros(300, 128, device="cuda").to(E4M3), torch.zeros(2**16, 128, device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")
    y, cast = rounded(a, b, (one, one), bias, tile), generated(function, element)
    for factor in (1.0, 37.3, 2.0**-9, 1e30):
        scale = torch.full((), factor, device="cuda")
        found = quantized(a, b, (one, one), scale, bias, tile, steps, dtype)
        expected = cast(y, scale)
        differ = (found.view(torch.uint8) != expected.view(torch.uint8)).any(0).sum()
        assert differ <= (2 if name == "gelu" else 0)


@pytest.mark.parametrize(("place", "tile"), list(enumerate(QUANTIZED_TILES)), ids=str)
def test_a_product(place, tile):
    """The sizes are such that no tile divides them; a row of NaN and a column of large values reach no other."""
    (function, steps), bias = ACTIVATIONS["gelu"], place % 2 == 0
    m, n, k = 3 * tile.m * tile.cluster_m - 40, 2 * tile.n * tile.cluster_n - 48, 528
    build.start(
        kernel_of(tile, "90", E4M3, E4M3, out, "tensor", bias, True, NOTHING, how)
        for out, how in ((E4M3, steps), (BF16, None))
    )
    a, b = (torch.randn(rows, k, device="cuda").mul_(4).to(E4M3) for rows in (m, n))
    a[3], b[5] = float("nan"), 448.0
    scales = [torch.rand((), device="cuda").add_(0.5).div_(300) for _ in range(2)]
    added, scale = torch.randn(n, device="cuda", dtype=BF16) if bias else None, torch.full((), 57.0, device="cuda")
    found = quantized(a, b, scales, scale, added, tile, steps, E4M3)
    assert same(found, generated(function, "e4m3")(rounded(a, b, scales, added, tile), scale))
    assert found[3].isnan().all() and not found[:3].isnan().any() and not found[4:].isnan().any()


class Mlp(nn.Module):
    def __init__(self, dim, hidden, function):
        super().__init__()
        made = {"device": "cuda", "dtype": BF16}
        self.up, self.down, self.function = nn.Linear(dim, hidden, **made), nn.Linear(hidden, dim, **made), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inference(mode, no_caches):
    """No kernel stands, under a known scale, between the GEMMs; the result is that of the GEMM and the kernel. In grad
    mode, where amaxes are recorded, one does."""
    torch.manual_seed(0)
    model = Mlp(1024, 4096, F.gelu).requires_grad_(False)
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=BF16)
    choose = tables.choose
    tile = choose(dense(8192, 4096, 1024, out=E4M3, bias=True, activation=Activation()))

    def two_kernels(problem):  # the same tile for the first GEMM, so that its sums are the same
        return None if problem.epilogue.activation else tile if problem.sizes.n == 4096 else choose(problem)

    def result(grad, chosen=choose):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(grad):
            patch.setattr(tables, "choose", chosen)
            run = torch.compile(model, backend="te", fullgraph=True, options={"policy": {"*": "delayed"}, "mode": mode})
            run(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                y = run(x).clone()
        return y, any("triton" in event.key and "gelu" in event.key for event in profile.key_averages())

    assert result(grad=True)[1]
    mine, apart = result(grad=False)
    theirs, others = result(grad=False, chosen=two_kernels)
    assert others and not apart
    assert torch.equal(mine, theirs)
