"""Casts that a GEMM takes over: which are, and that the graph computes what it did. On CPU no kernel pays, so the pass
is told that each does."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import ops, recipes
from te_inductor.fused import quantized_epilogue
from te_inductor.kernels.cutlass_tiles import FAST_TILES, kernel_of
from te_inductor.numerics.activation import Activation
from te_inductor.passes.graph import activations
from te_inductor.recipes import Quantizer
from tests.support.layers import linears

SLOTS = recipes.resolve("current").slots()
E4M3 = Quantizer("e4m3")


KERNEL = kernel_of(FAST_TILES[0], "90", torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, "tensor", False, True)


@pytest.fixture(autouse=True)
def pays(monkeypatch):
    monkeypatch.setattr(quantized_epilogue, "_kernel", lambda *_: KERNEL)
    monkeypatch.setattr(quantized_epilogue.build, "start", lambda kernels: None)


def layer(x, w):
    return linears(x, [w], [], SLOTS, torch.bfloat16)[0]


def cast(y, scale):
    return ops.quantize_delayed(y.reshape(-1, y.shape[-1]), scale, E4M3)


def of(function):
    return lambda x, w, scale: cast(function(layer(x, w)), scale)


def read_twice(x, w, scale):
    y = layer(x, w)
    return cast(y.relu(), scale), y


def recorded(x, w, scale):
    """A layer recorded in grad mode, so that later steps know its scale."""
    y = layer(x, w).relu().reshape(-1, w.shape[0])
    ops.record_amax([y], amax := torch.zeros(()))
    return ops.quantize_delayed(y, scale, E4M3), amax


def current(x, w, scale):
    """The scale follows from what is cast."""
    y = layer(x, w).reshape(-1, w.shape[0]).relu()
    return ops.quantize_delayed(y, ops.current_scale([y], E4M3)[0], E4M3)


FOLDED = {
    "nothing between": (of(lambda y: y), True),
    "gelu": (of(F.gelu), True),
    "gelu, tanh": (of(lambda y: F.gelu(y, approximate="tanh")), True),
    "silu": (of(F.silu), True),
    "relu": (of(F.relu), True),
    "relu squared": (of(lambda y: F.relu(y).square()), True),
    "relu to a power": (of(lambda y: F.relu(y) ** 2), True),
    "a sigmoid by hand": (of(lambda y: y * torch.sigmoid(1.702 * y)), True),
    "less than": (of(lambda y: -(y - 1)), True),
    "heads": (of(lambda y: y.reshape(8, 8, 2, 16)), True),
    "scaled sum": (of(lambda y: torch.add(y, y, alpha=2)), False),
    "cube": (of(lambda y: y**3), False),
    "infinite": (of(lambda y: y * float("inf")), False),
    "fp16": (of(lambda y: y.half()), False),
    "a tensor": (lambda x, w, scale: cast(layer(x, w) * scale, scale), False),
    "strided": (of(lambda y: y.relu().transpose(0, 1)), False),
    "broadcast": (of(lambda y: y.reshape(2, 4, 8, 32) + y.reshape(8, 8, 32)[:4]), False),
    "two layers": (lambda x, w, scale: cast(layer(x, w) * layer(x.tanh(), w), scale), False),
    "padded": (of(lambda y: y.reshape(8, 8, 4, 8)), False),
    "read twice": (read_twice, False),
    "amax recorded": (recorded, False),
    "current scaling": (current, False),
    "no layer": (lambda x, w, scale: cast(x.relu(), scale), False),
}


def folded(function, *inputs):
    traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    activations.share_sigmoids(traced.graph)
    quantized_epilogue.fold(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


@pytest.mark.parametrize(("function", "folds"), FOLDED.values(), ids=FOLDED.keys())
def test_which_casts_a_gemm_takes_over(function, folds):
    x, w, scale = torch.randn(8, 8, 32), torch.randn(32, 32), torch.tensor(17.0)
    traced = folded(function, x, w, scale)
    assert len(traced.graph.find_nodes(op="call_function", target=quantized_epilogue.quantized_mm)) == folds
    found, expected = traced(x, w, scale), function(x, w, scale)
    if not folds:
        pairs = zip(*([y] if isinstance(y, torch.Tensor) else y for y in (found, expected)), strict=True)
        assert all(torch.equal(one.float().nan_to_num(1e9), other.float().nan_to_num(1e9)) for one, other in pairs)
        return
    # The graph rounds to bf16 before the cast as well, which generated code does not: a step of E4M3, or its smallest.
    assert found.shape == expected.shape
    assert ((found.float() - expected.float()).abs() <= expected.float().abs() / 8 + 2.0**-9).all()


@pytest.mark.parametrize("name", ["gelu", "gelu, tanh", "silu", "relu squared"])
def test_it_is_computed_in_fp32(name):
    """Special values too: those of the function in fp32, of what the layer rounds to bf16."""
    x, w, scale = torch.randn(8, 8, 32), torch.randn(32, 32), torch.tensor(17.0)
    x[0, 0, 0], x[1, 1] = float("nan"), 1e30
    function, y = FOLDED[name][0], layer(x, w)
    wanted = {"gelu": F.gelu, "silu": F.silu, "relu squared": lambda y: F.relu(y).square()}
    wanted["gelu, tanh"] = lambda y: F.gelu(y, approximate="tanh")
    # torch's GELU in fp32 is off by 6e-4 of its value at -3.9, where the processor has no AVX512.
    found, expected = folded(function, x, w, scale)(x, w, scale), cast(wanted[name](y.double()).float(), scale)
    # They differ by roundings of fp32, which take one in 2**20 over a step of E4M3.
    found, expected = found.float(), expected.float()
    assert ((found != expected) & ~(found.isnan() & expected.isnan())).sum() <= 1


def test_precision_casts_that_are_asked_for():
    with config.patch(emulate_precision_casts=True):
        traced = folded(FOLDED["gelu"][0], torch.randn(8, 8, 32), torch.randn(32, 32), torch.tensor(17.0))
    assert not traced.graph.find_nodes(op="call_function", target=quantized_epilogue.quantized_mm)


def test_the_lowering_where_no_kernel_does_it(no_caches):
    """The GEMM's sums are exact, also in bf16, so that it is as in eager code."""
    a, b = (torch.randint(-1, 2, shape).to(torch.float8_e4m3fn) for shape in ((48, 32), (64, 32)))
    one, bias, scale = torch.tensor(2.0**-3), torch.randint(-2, 3, (64,)).bfloat16(), torch.tensor(19.0)
    activation = Activation((("sigmoid", 0), ("mul", 0, 1), ("add", 2, 0.25)))
    operands = (a, one, b, one, bias, SLOTS.fprop, torch.bfloat16, activation, scale, E4M3)
    found = torch.compile(lambda: quantized_epilogue.quantized_mm(*operands), backend="te", fullgraph=True)()
    y = ops.scaled_mm(*operands[:7]).float()
    expected = ops.quantize_delayed(y * torch.sigmoid(y) + 0.25, scale, E4M3)
    assert (found.float() != expected.float()).sum() <= 1  # the sigmoid's last bit
    assert torch.equal(quantized_epilogue.quantized_mm(*operands).float(), expected.float())
