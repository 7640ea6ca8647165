"""The pass that gives a gated activation's backward and its casts to a GEMM: what it finds, what it leaves, and that
the op computes the same. The kernel itself is tested in tests/gpu, generated code in tests/offline, in files of this
name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import ops
from te_inductor.fused import gated_dgrad
from te_inductor.numerics.activation import Gating
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.runtime.eager import dense
from te_inductor.templates import select
from te_inductor.templates.cutlass import build, launch
from te_inductor.templates.cutlass.scaled_mm import BLOCK_TILES, Problem

M, N, K = 256, 384, 128
QUANTIZER = Quantizer("e4m3", power_2_scale=True, scope="1x128")
DGRAD = Gemm("dgrad", False, ("1x128", "128x128"))
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "square": lambda x: x * x,
}


pytestmark = pytest.mark.usefixtures("pretended")


@pytest.fixture
def pretended(monkeypatch):
    """A device that CUTLASS has kernels for, none of which can be built: the op is the eager ones."""

    def chosen(problem: select.Problem) -> select.Choice:
        assert problem.gating is not None
        given = Problem("90", *problem.sizes, problem.a, problem.b, problem.out, "128x128", False, False)
        tile = BLOCK_TILES[2]
        return select.Choice(select.CUTLASS, tile, replace(given, gating=problem.gating).kernel(tile))

    monkeypatch.setattr(gated_dgrad, "select", chosen)
    monkeypatch.setattr(build, "start", lambda kernels: None)
    monkeypatch.setattr(launch, "_function", lambda *_: None)


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """dy and the weight, cast, and gate and up as one GEMM writes them."""
    torch.manual_seed(0)
    dy, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    both = torch.randn(M, 2 * N).to(dtype)
    return [*dense.quantize(dy, QUANTIZER), *dense.quantize(w, Quantizer("e4m3", scope="128x128")), both]


def backward(act: Callable[[Tensor], Tensor], quantizer: Quantizer = QUANTIZER, **given: Any) -> Callable[..., Any]:
    """dh by a GEMM, and what `torch.autograd` makes of it."""

    def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, both: Tensor) -> Any:
        gate, up = (x.view(2, M // 2, N) for x in (both[:, :N], both[:, N:]))
        dh = ops.scaled_mm(a, a_scale, b, b_scale, None, DGRAD, torch.bfloat16)
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        h = act(gate) * up
        dgate, dup = torch.autograd.grad(h, (gate, up), dh.view(h.shape).to(h.dtype))
        pieces = [x.reshape(M, N) for x in (dgate, dup)]
        made = ops.quantize_pieces(pieces, given.get("dim", 1), quantizer)
        more = {"dh": dh, "dgate": dgate.sum((0, 1)), "h": h}
        return made, *[more[name] for name in given.get("more", ())]

    return run


def traced(run: Callable[..., Any], given: list[Tensor]) -> fx.GraphModule:
    gm = make_fx(run, decomposition_table=select_decomp_table())(*given)
    gm.graph.eliminate_dead_code()
    return gm


def folded(gm: fx.GraphModule) -> list[fx.Node]:
    gated_dgrad.fold(gm.graph)
    gm.graph.lint()
    gm.recompile()
    op = torch.ops.te_inductor.cutlass_gated_gradient.default
    return list(gm.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize("act", GATES)
def test_what_is_found_computes_the_same(act):
    given = operands()
    gm = traced(backward(GATES[act], more=("h",)), given)
    expected, h = gm(*given)
    [node] = folded(gm)
    made, same = gm(*given)
    assert torch.equal(h, same)  # the forward's own activation stays
    targets = {each.target for each in gm.graph.nodes}
    assert ops.scaled_mm not in targets and ops.quantize_pieces not in targets
    for (data, scale), (data_2, scale_2) in zip((made[:2], made[2:]), (expected[:2], expected[2:]), strict=True):
        assert data.shape == data_2.shape and scale.shape == scale_2.shape
        x, y = (dense.dequantize(*each, QUANTIZER, torch.float32) for each in ((data, scale), (data_2, scale_2)))
        assert (x - y).norm() <= 0.03 * y.norm()
    gating: Gating = node.args[7]
    d, gate, up = (torch.randn(1000, dtype=torch.float64) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    exact = torch.autograd.grad(GATES[act](gate) * up, (gate, up), d)
    orders = [gating.of(d, *pair) for pair in ((gate.detach(), up.detach()), (up.detach(), gate.detach()))]
    errors = [max((x.double() - y).abs().max() for x, y in zip(order, exact, strict=True)) for order in orders]
    assert min(errors) < 1e-5  # whichever of the two comes first


def test_a_sigmoid_is_computed_once():
    [node] = folded(traced(backward(F.silu), operands()))
    steps = node.args[7].steps
    assert sum(name == "sigmoid" for name, *_ in steps) == 1 and len(set(steps)) == len(steps) == 9


@pytest.mark.parametrize(
    "given",
    [
        {"more": ("dh",)},
        {"more": ("dgate",)},
        {"dim": 0},
        {"quantizer": Quantizer("e4m3", scope="1x128")},
        {"quantizer": Quantizer("e4m3", power_2_scale=True, amax_epsilon=1e-3, scope="1x128")},
        {"quantizer": Quantizer("e4m3", power_2_scale=True, scope="128x128")},
    ],
    ids=["dh_is_read", "a_bias_s_gradient", "one_above_the_other", "any_scale", "epsilon", "square_blocks"],
)
def test_what_is_left_alone(given):
    assert not folded(traced(backward(F.silu, **given), operands()))


def test_a_copy_that_nobody_reads_is_not_made():
    def rows(*given: Tensor) -> Tensor:
        return backward(F.silu)(*given)[0][0]

    assert not folded(traced(rows, operands()))


def test_other_dtypes_and_layouts_are_left_alone():
    given = operands(torch.float16)
    assert not folded(traced(backward(F.silu), given))
    given = operands()
    given[-1] = given[-1].t().contiguous().t()  # columns lie together
    assert not folded(traced(backward(F.silu), given))
    odd = torch.randn(M, 2 * N + 1).bfloat16()[:, 1:]
    assert not folded(traced(backward(F.silu), [*given[:-1], odd]))


def test_activations_with_other_steps_are_left_alone():
    """erf's derivative is an exponential, ReLU's a comparison."""
    for act in (F.gelu, F.relu, lambda x: F.silu(x) * torch.arange(N).bfloat16()):
        assert not folded(traced(backward(act), operands()))


def test_roundings_that_are_asked_for_stay():
    gm = traced(backward(F.silu), operands())
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert not folded(gm)
