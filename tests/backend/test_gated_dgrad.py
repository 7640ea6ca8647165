"""The pass that gives a gated activation's backward and its casts to a GEMM: what it finds, what it leaves, and that
the op computes the same. The kernel itself is tested in tests/gpu, generated code in tests/offline, in files of this
name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import ops
from te_inductor.numerics.activation import Gating
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import dense
from tests.support.gated_dgrad import GATES, QUANTIZER, M, N, backward, folded, operands, pretended, traced  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("pretended")


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
    assert sum(name == "sigmoid" for name, *_ in steps) == 1
    assert len(set(steps)) == len(steps) <= 10  # torch 2.11 has a product with 1.0 more


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
