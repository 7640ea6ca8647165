"""Weight gradients that the backward adds to `main_grad` in fp32: options={"wgrad": "main_grad"}."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch

from te_inductor import explain
from te_inductor.errors import FallbackWarning, MainGradError, OptionError
from tests.support.main_grads import MODELS, Pair, te, with_totals
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_tracing")


@pytest.mark.traced
@pytest.mark.quick(
    "mlp-{}", "merged-{'recipe': 'delayed', 'weights': 'once'}", "checkpoint-{'recipe': 'delayed', 'weights': 'once'}"
)
@pytest.mark.parametrize("options", [{}, {"recipe": "delayed", "weights": "once"}], ids=str)
@pytest.mark.parametrize("make, _, shape", MODELS.values(), ids=MODELS.keys())
def test_microbatches_add_up(make, _, shape, options):
    """The same sums of the same products, bit for bit; two microbatches in flight, then zeroed in between."""
    pair = Pair(make(), "main_grad", **options)
    first = pair.forward(*shape)
    assert all(p.grad_added_to_main_grad for p in pair.model.parameters() if hasattr(p, "main_grad"))
    if options:  # uncompiled, delayed scaling's state suffers no two
        pair.backward(*first)
        pair.check()
        pair.backward(*pair.forward(*shape))
        pair.check()
    else:
        second = pair.forward(*shape)
        pair.backward(*first)
        pair.check()
        pair.backward(*second)
        pair.check()
    third = pair.forward(*shape)
    for p in pair.model.parameters():
        p.grad = None
        if hasattr(p, "main_grad"):
            p.main_grad.zero_()
    pair.twin.zero_grad()
    pair.backward(*third)
    pair.check()


@pytest.mark.quick("rowwise", "mxfp8")
@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.codegen), "rowwise", "block", "mxfp8"])
def test_recipes(recipe, request):
    """Recipes add to totals; by Inductor's own code also twice through one backward."""
    twice = request.node.get_closest_marker("codegen") is not None
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128, bias=False))
    pair = Pair(model, "main_grad", policy={"*": recipe}, fallback="silent")
    with functorch.patch(donated_buffer=False):
        step = pair.forward(8, 128)
        pair.backward(*step, retain_graph=twice)
        pair.check()
        if twice:
            pair.backward(*step)
            pair.check()


def test_bf16_sums_in_fp32():
    """Many small gradients behind a large one: bf16 would lose them."""
    layer = with_totals(nn.Linear(32, 32, bias=False).bfloat16())
    run = te(layer, wgrad="main_grad")
    expected = torch.zeros(32, 32, dtype=torch.float64)
    for step in range(20):
        x, dy = torch.ones(8, 32), torch.full((8, 32), 1.0 if step == 0 else 2.0**-12)
        run(x.bfloat16()).backward(dy.bfloat16())
        expected += (dy.t() @ x).double()
    assert layer.weight.grad is None
    # Scales are rounded to fp32, and so are 20 sums.
    assert torch.allclose(layer.weight.main_grad.double(), expected, rtol=32 * 2.0**-24, atol=0.0)
    assert not torch.allclose(expected.bfloat16().double(), expected, rtol=2.0**-10, atol=0.0)


def test_into_grad_itself():
    """An fp32 parameter whose `grad` is its `main_grad`: an optimizer finds the sums where it looks for gradients."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    for p in model.parameters():
        if p.dim() == 2:
            p.grad = p.main_grad = torch.zeros_like(p)
    runs = {one: te(one, wgrad=wgrad) for one, wgrad in ((model, "main_grad"), (twin, "grad"))}
    for _ in range(2):
        xs = torch.randn(3, 8, 32)
        for one, run in runs.items():
            optimizer = torch.optim.AdamW(one.parameters())
            for x in xs:
                run(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p, other) for p, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(p.grad is p.main_grad for p in model.parameters() if p.dim() == 2)


def test_nothing_else_has_a_gradient():
    """A backward whose only effect is the addition."""
    layer = with_totals(nn.Linear(32, 32, bias=False))
    te(layer, wgrad="main_grad")(torch.ones(8, 32)).sum().backward()
    assert torch.allclose(layer.weight.main_grad, torch.full((32, 32), 8.0), rtol=8 * 2.0**-24)
    with torch.no_grad():
        te(layer, wgrad="main_grad")(torch.ones(8, 32))


def test_which_gradients_go_to_autograd_is_said():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.added, self.other, self.frozen = (nn.Linear(32, 32) for _ in range(3))
            self.frozen.weight.requires_grad_(False)
            self.kn = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return self.frozen(self.other(self.added(x))) @ self.kn

    model = Model()
    model.added.weight.main_grad, model.kn.main_grad = torch.zeros(32, 32), torch.zeros(32, 32)
    options, x = {"recipe": "current", "wgrad": "main_grad"}, torch.randn(8, 32)
    unmet = {fqn: reason for option, fqn, reason in explain(model, x, options=options).unmet}
    assert unmet == {
        "other": "the parameter has no main_grad",
        "": "the parameter holds the transpose of what the GEMM computes",
    }
    with pytest.warns(
        FallbackWarning, match="option 'wgrad' does not reach, because the parameter has no main_grad: other"
    ):
        y = te(model, **options, fallback="warn")(x)
    y.sum().backward()
    assert model.added.weight.grad is None and model.added.weight.main_grad.any()
    assert model.other.weight.grad is not None and model.kn.grad is not None and not model.kn.main_grad.any()


@pytest.mark.parametrize("first", [True, False], ids=["with a total first", "without"])
def test_modules_of_one_class(first):
    """Modules of one class run one graph, as blocks that are compiled one by one do, unless some have totals and others
    have none."""
    counters.clear()
    blocks = [nn.Sequential(nn.Linear(32, 32)) for _ in range(4)]
    x = torch.randn(8, 32, requires_grad=True)
    for place, block in enumerate(blocks):
        if (place % 2 == 0) == first:
            with_totals(block)
        x = te(block, wgrad="main_grad", fallback="silent")(x)
    x.sum().backward()
    for block in blocks:
        weight = block[0].weight
        assert (weight.grad is None) == hasattr(weight, "main_grad")
        assert getattr(weight, "main_grad", weight.grad).any()
    assert counters["stats"]["unique_graphs"] == 2


def test_totals_that_come_and_go():
    layer, x = nn.Linear(32, 32), torch.randn(8, 32)
    run = te(layer, wgrad="main_grad", fallback="warn")
    for total in (None, torch.zeros(32, 32), None, torch.zeros(32, 32)):
        layer.weight.grad = None
        layer.weight.main_grad = total
        run(x).sum().backward()
        assert (layer.weight.grad is None) == (total is not None)
        assert total is None or total.any()
    del layer.weight.main_grad
    with pytest.warns(FallbackWarning, match="the parameter has no main_grad"):
        run(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "total",
    [
        torch.zeros(32, 48).t(),
        torch.zeros(48, 32, dtype=torch.bfloat16),
        torch.zeros(32, 48),
        torch.zeros(48, 64)[:, ::2],
    ],
    ids=["transposed", "bfloat16", "shape", "strided"],
)
def test_totals_that_do_not_fit(total):
    """Refused when the model is compiled, and when one is put in the place of another."""
    expected = (
        rf"strides \({total.stride(0)}, {total.stride(1)}\).*expected torch.float32 of shape \(48, 32\), contiguous"
    )
    layer = nn.Linear(32, 48)
    layer.weight.main_grad = total
    with pytest.raises(Exception, match=expected) as raised:
        te(layer, wgrad="main_grad")(torch.randn(8, 32))
    assert isinstance(raised.value.inner_exception, MainGradError)
    with_totals(layer)
    run = te(layer, wgrad="main_grad")
    run(torch.randn(8, 32))
    layer.weight.main_grad = total
    with pytest.raises(MainGradError, match=expected):
        run(torch.randn(8, 32))


def test_inside_and_outside_of_ddp(monkeypatch):
    """DistributedDataParallel reduces the gradients of what is called in its forward, and of nothing else."""
    from torch.nn.parallel import DistributedDataParallel

    layer, x = with_totals(nn.Linear(32, 32)), torch.randn(8, 32)
    run = te(layer, wgrad="main_grad", fallback="silent")
    with torch._dynamo.config.patch(optimize_ddp=False):
        for active in (None, object(), None, object()):
            monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", active)
            layer.weight.grad = None
            layer.weight.main_grad.zero_()
            run(x).sum().backward()
            assert (layer.weight.grad is None) == (active is None)
            assert layer.weight.main_grad.any() == (active is None)


def test_option():
    with pytest.raises(
        Exception, match="unknown value of option 'wgrad' 'main_grads'; did you mean 'main_grad'"
    ) as raised:
        te(mlp(), wgrad="main_grads")(torch.randn(8, 32))
    assert isinstance(raised.value.inner_exception, OptionError)


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "a part"])
def test_gradients_that_no_graph_shows(whole):
    """An embedding outside of every graph, tied to a layer inside: its gradient comes to autograd, and the flag says so
    when hooks run, in each microbatch."""
    embedding, layer = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
    layer.weight = embedding.weight
    with_totals(layer)
    flags, weight = [], layer.weight
    weight.register_post_accumulate_grad_hook(lambda p: flags.append((p.grad_added_to_main_grad, p.grad is None)))
    run, ids = te(layer, wgrad="main_grad"), torch.arange(8)
    ys = [run(embedding(ids).detach() if whole else embedding(ids)) for _ in range(2)]
    for y in ys:
        y.sum().backward()
        weight.grad = None
    assert flags == [(whole, whole)] * 2 and weight.main_grad.any()
    run(torch.randn(8, 32)).sum().backward()
    assert flags[-1] == (True, True)
