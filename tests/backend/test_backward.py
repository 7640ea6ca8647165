"""The option `backward`: which GEMM of a compiled model is in which precision, and what it composes with."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_inductor
from te_inductor import errors, explain, recipes
from te_inductor.passes.pre_grad.decide.cast_costs import BackwardGemm, Layer, Layers
from te_inductor.passes.pre_grad.decide.size_rule import of_layers
from te_inductor.targets import sm90
from tests.backend.delayed_programs import checkpointed
from tests.eager import quantized_as
from tests.experts import FixedExperts
from tests.recipes import every_recipe
from tests.support.main_grads import te, with_totals
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_tracing")

BACKWARDS = ["high_precision", "dequantized", "current", {"dgrad": "mxfp8", "wgrad": "dequantized"}]


class Block(nn.Module):
    """A norm in front of two layers that may be one, a bias, an activation between them and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def trained(run, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def options_of(name: str, backward: object, **more: object) -> dict:
    return {"recipe": name, "backward": backward, "fallback": "silent", **more}


def pair(model: nn.Module, x: torch.Tensor, name: str, backward: object, **more: object) -> list[list[torch.Tensor]]:
    """What a compiled model computes, and what its layers do one by one."""
    options = options_of(name, backward, **more)
    recipe = type(recipes.resolve(name))(backward=backward)
    twin = quantized_as(
        explain(model, x.clone().requires_grad_(), options=options), copy.deepcopy(model), {name: recipe}
    )
    run = torch.compile(model, backend="te", fullgraph=True, options=options)
    return [trained(run, model, x), trained(twin, twin, x)]


@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
@every_recipe
def test_a_block(name, backward):
    stochastic = recipes.resolve(name).slots().grad_output.stochastic  # seeds are drawn in another order
    if not stochastic:
        for found, expected in zip(*pair(Block(), torch.randn(2, 32, 64), name, backward), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("name", "backward", "dtype"),
    [
        ("delayed", "dequantized", torch.bfloat16),
        pytest.param("rowwise", {"dgrad": "mxfp8"}, torch.float32, marks=pytest.mark.thorough),
        pytest.param("nvfp4", "dequantized", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("mxfp8", "high_precision", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("block", "dequantized", torch.float32, marks=pytest.mark.thorough),
        pytest.param("current", "block", torch.float32, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_generated_code(name, backward, dtype):
    """A layer alone, whose input is cast as it is: up to the order of sums."""
    for found, expected in zip(
        *pair(nn.Sequential(nn.Linear(128, 96)).to(dtype), torch.randn(48, 128).to(dtype), name, backward), strict=True
    ):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.traced
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "rowwise"])
def test_a_checkpoint_with_weights_cast_once_and_totals(backward):
    more = {"weights": "once", "wgrad": "main_grad"}
    model = with_totals(checkpointed())
    plain = copy.deepcopy(model)
    found = trained(te(model, backward=backward, **more), model, x := torch.randn(8, 32))
    expected = trained(te(plain, backward=backward), plain, x)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.main_grad if one.dim() == 2 else one.grad, other.grad)
        assert one.dim() != 2 or one.grad is None


def test_weights_cast_once_have_one_copy_where_dgrad_reads_none(casts):
    for backward in (None, "dequantized", "high_precision"):
        te(mlp(), backward=backward, weights="once")(torch.randn(8, 32, requires_grad=True)).sum().backward()
    columns = [cached.data_t is not None for cached in casts]
    assert columns == [True, True, False, False, False, False]


@pytest.mark.traced
def test_any_number_of_rows():
    model = mlp()
    run = torch.compile(model, backend="te", dynamic=True, options=options_of("rowwise", "dequantized"))
    for rows in (8, 24):
        x = torch.randn(rows, 32)
        recipe = recipes.Float8RowwiseScaling(backward="dequantized")
        twin = quantized_as(explain(model, x, options={"recipe": "rowwise"}), copy.deepcopy(model), {"rowwise": recipe})
        assert all(map(torch.equal, trained(run, model, x), trained(twin, twin, x)))


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8"])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "mxfp8"])
def test_experts(name, backward):
    model, x = FixedExperts(64, 64, 4).bfloat16(), torch.randn(16, 64).bfloat16()
    if name == "delayed":
        run = torch.compile(model, backend="te", options=options_of(name, backward))
        assert all(one.isfinite().all() for one in trained(run, model, x))
        return
    options = options_of(name, backward)
    [site, *_] = explain(model, x.clone().requires_grad_(), options=options).sites
    assert site.pattern == "grouped_linear" and site.kernel != "high_precision"
    found = trained(torch.compile(model, backend="te", options=options), model, x)
    model.low = type(recipes.resolve(name))(backward=backward)
    for one, expected in zip(found, trained(model, model, x), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-2, atol=2e-2)


def test_the_report_says_which_gemm_is_in_which_precision():
    report = explain(mlp(), torch.randn(8, 32, requires_grad=True), options=options_of("nvfp4", {"dgrad": "mxfp8"}))
    found = [(site.gemm, site.recipe, site.kernel == "high_precision") for site in report.sites[:3]]
    assert found == [("fprop", "nvfp4", False), ("dgrad", "mxfp8", False), ("wgrad", "nvfp4", False)]
    report = explain(mlp(), torch.randn(8, 32, requires_grad=True), options=options_of("current", "dequantized"))
    found = [(site.gemm, site.recipe, site.kernel == "high_precision", site.reason) for site in report.sites[:3]]
    assert found[1:] == [(gemm, "dequantized", True, None) for gemm in ("dgrad", "wgrad")]
    assert "High precision" not in str(report) and "dequantized" in str(report)
    assert "dequantized" in report.table(details=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("dequantized", "dequantized"), ("mxfp8", "mxfp8"), ('{"dgrad": "high_precision"}', "high_precision")],
)
def test_the_environment_and_a_recipes_own_say(monkeypatch, text, expected):
    x = torch.randn(8, 32, requires_grad=True)

    def dgrad(**options) -> str:
        return explain(mlp(), x, options={"recipe": "current", "fallback": "silent", **options}).sites[1].recipe

    monkeypatch.setenv("TE_INDUCTOR_BACKWARD", text)
    assert dgrad() == expected
    assert dgrad(backward="rowwise") == "rowwise"
    assert dgrad(recipe=recipes.Float8CurrentScaling(backward="mxfp4")) == "mxfp4"
    assert dgrad(policy={"*": recipes.Float8CurrentScaling(backward={"dgrad": "mxfp4"})}) == "mxfp4"
    with te_inductor.autocast(recipe="rowwise"):
        assert dgrad() == expected
    monkeypatch.setenv("TE_INDUCTOR_BACKWARD", "zzz")
    with pytest.raises(errors.RecipeError, match="unknown environment variable TE_INDUCTOR_BACKWARD 'zzz'"):
        dgrad()


def test_a_wrong_option_is_said_before_anything_is_compiled():
    with pytest.raises(Exception, match="unknown option 'backward' 'high'"):
        torch.compile(mlp(), backend="te", options={"backward": "high"})(torch.randn(8, 32))


def test_delayed_scaling_keeps_what_it_casts_alone():
    """No history of gradients where none is cast, and those of x and the weights stay whatever the backward is."""
    model, x = mlp(), torch.randn(8, 32)
    states = []
    for backward in ("high_precision", {"wgrad": "dequantized"}):
        torch.compile(model, backend="te", options=options_of("delayed", backward))(x).sum().backward()
        states.append({key: value.clone() for key, value in te_inductor.state_dict(model).items()})
        torch._dynamo.reset()
    first, second = states
    assert first and not any("grad_output" in key for key in first)
    assert first.keys() < second.keys() and any("grad_output" in key for key in second)
    recorded = [int((value != 0).sum()) for key in first if "history" in key for value in (first[key], second[key])]
    assert recorded and recorded[1::2] == [2 * number for number in recorded[::2]]


def refusals(model: nn.Module, x: torch.Tensor, **options: object) -> list[str]:
    report = explain(model, x.clone().requires_grad_(), options={"recipe": "current", "fallback": "silent", **options})
    return [str(site.reason) for site in report.sites if site.reason] + [one.reason for one in report.unmet]


def test_refusals_by_name():
    x = torch.randn(16, 64)
    [*found] = refusals(FixedExperts(64, 64, 4), x, backward="dequantized")
    assert "compiles for bfloat16 alone, here is float32" in found[0]
    [one, *_] = refusals(mlp(), x[:, :32], backward="high_precision", wgrad="deferred")
    assert "tensors of the program, which may have changed" in one
    experts = with_totals(FixedExperts(64, 64, 4).bfloat16())
    experts.weight.main_grad = torch.zeros(4, 64, 64)
    [one] = refusals(experts, x.bfloat16(), backward="high_precision", wgrad="main_grad")
    assert "adds to no total" in one
    stored = te_inductor.quantize_(mlp(), "rowwise")
    assert any("its weight is stored" in one for one in refusals(stored, x[:, :32], backward="dequantized"))
    with pytest.raises(errors.RecipeError, match="expected a recipe without backward"):
        te_inductor.quantize_(mlp(), recipes.Float8RowwiseScaling(backward="dequantized"))


def test_the_size_rule_counts_what_is_saved():
    """Three GEMMs in low precision save three times what one does; what is dequantized costs bytes."""
    rates = sm90.H200
    own = Layers(16384, 4096, (Layer(4096, "kernel"),), "kernel", "tensor")
    high = Layers(16384, 4096, (Layer(4096, "kernel"),), "kernel", "tensor", *[BackwardGemm(high=True)] * 2)
    low = Layers(
        16384, 4096, (Layer(4096, "kernel"),), "kernel", "tensor", *[BackwardGemm(high=True, dequantized=True)] * 2
    )
    first, second, third = (of_layers(one, rates) for one in (own, high, low))
    assert first.bf16_s == pytest.approx(second.bf16_s) == pytest.approx(third.bf16_s)
    assert first.saved_s == pytest.approx(3 * second.saved_s) and second.saved_s == third.saved_s
    assert second.cost_s < third.cost_s < first.cost_s


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.traced
@pytest.mark.parametrize("name", ["current", "rowwise"])
def test_what_a_compiled_model_saves(name):
    """A byte an element of each layer's input where operands are dequantized, and nothing of weights."""
    model, x = (
        nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16(),
        torch.randn(64, 256),
    )
    sizes = {}
    for backward in (None, "high_precision", "dequantized"):
        torch._dynamo.reset()
        own, saved = {p.data_ptr() for p in model.parameters()}, {}

        def pack(t, own=own, saved=saved):
            if t.data_ptr() not in own:
                saved[t.data_ptr()] = t
            return t

        run = torch.compile(model, backend="te", options=options_of(name, backward))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = run(x.bfloat16().requires_grad_())
        sizes[backward] = sum(t.nbytes for t in saved.values())
        del y
    assert sizes["dequantized"] < 0.6 * sizes["high_precision"], sizes
    assert sizes["dequantized"] <= sizes[None] * 1.05, sizes


def test_an_accuracy_report_has_what_is_cast():
    gemms = te_inductor.accuracy_report(
        mlp(),
        torch.randn(8, 32, requires_grad=True),
        options=options_of("current", {"dgrad": "rowwise", "wgrad": "dequantized"}),
    ).gemms
    assert [gemm.gemm for gemm in gemms] == ["fprop", "dgrad"] * 2
