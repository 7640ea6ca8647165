"""Weight gradients of parameters whose `grad_dtype` is another dtype than theirs: Note [Gradients that are not rounded]."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from te_inductor import backward_dw, explain
from te_inductor.errors import FallbackWarning
from tests.support.main_grads import MODELS, te, with_totals
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_codegen")
WIDE = (torch.float32, torch.float64, torch.float16)


def typed(model: nn.Module, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """The model in bfloat16, with gradients of matrices in another dtype."""
    model = model.bfloat16()
    for p in model.parameters():
        if p.dim() > 1:
            p.grad_dtype = dtype
    return model


def train(run, *shape: int, steps: int = 1, seed: int = 3) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        run(torch.randn(shape, dtype=torch.bfloat16)).float().square().sum().backward()


def same_as_totals(model: nn.Module, twin: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype == (dtype if p.dim() > 1 else p.dtype)
        assert torch.equal(p.grad, getattr(other, "main_grad", other.grad).to(dtype).to(p.grad.dtype))


@pytest.mark.quick("mlp-{'recipe': 'current'}", "merged-{'recipe': 'delayed', 'weights': 'once'}")
@pytest.mark.parametrize(
    "options",
    [pytest.param({"recipe": "current"}, marks=pytest.mark.codegen), {"recipe": "delayed", "weights": "once"}],
    ids=str,
)
@pytest.mark.parametrize("make, shape", [(make, shape) for make, _, shape in MODELS.values()], ids=MODELS.keys())
def test_as_totals_have_it(make, shape, options):
    """Bit for bit what the GEMM adds to a `main_grad`, of two microbatches, and more than bf16 holds."""
    model = make().bfloat16()
    twin = with_totals(copy.deepcopy(model))
    typed(model)
    train(te(model, **options), *shape, steps=2)
    train(te(twin, **options, wgrad="main_grad"), *shape, steps=2)
    same_as_totals(model, twin)
    assert all(not torch.equal(p.grad, p.grad.bfloat16().float()) for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_dtypes(dtype):
    """Autograd casts what the GEMM has summed, once; hooks see what `grad` has."""
    model, seen = mlp().bfloat16(), []
    twin = with_totals(copy.deepcopy(model))
    typed(model, dtype)[0].weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    train(te(model), 8, 32)
    train(te(twin, wgrad="main_grad"), 8, 32)
    same_as_totals(model, twin, dtype)
    assert seen == [dtype]


def test_any_dtype_and_the_own():
    """None, by which any dtype is one, and the parameter's own, are the program that there was."""
    plain = mlp().bfloat16()
    nothing = typed(copy.deepcopy(plain), None)
    own = typed(copy.deepcopy(plain), torch.bfloat16)
    for model in (plain, nothing, own):
        train(te(model), 8, 32)
    for p, *others in zip(plain.parameters(), nothing.parameters(), own.parameters(), strict=True):
        assert all(torch.equal(p.grad, other.grad) and other.grad.dtype == torch.bfloat16 for other in others)


def test_set_and_changed_after_a_call():
    """Each change compiles the graph anew, or finds the one that there is, and none is ignored."""
    model = mlp().bfloat16()
    twin = with_totals(copy.deepcopy(model))
    run, graphs = te(model), []
    train(te(twin, wgrad="main_grad"), 8, 32)
    counters.clear()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64, torch.float32):
        model.zero_grad()
        typed(model, dtype)
        train(run, 8, 32)
        same_as_totals(model, twin, dtype)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 3, 3]


def test_compiled_beside_gradients_in_that_dtype():
    """What compiles between a backward and `zero_grad` is in low precision too, and adds to what is there; a program that
    reads `grad` has it. Of these layers Dynamo breaks the graph for another backend, without a word."""
    model = typed(mlp().bfloat16())
    train(te(model), 8, 32)
    once = [p.grad.clone() for p in model.parameters()]
    torch._dynamo.reset()
    train(te(model), 8, 32)
    assert all(torch.equal(p.grad, 2 * grad) for p, grad in zip(model.parameters(), once, strict=True))
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    assert all(site.kernel != "high_precision" for site in explain(model, x, options={"recipe": "current"}).sites)

    def reads(x):
        grad = model[0].weight.grad
        return model(x).sum() * 0 + (5 if grad is None else grad.sum())

    run, weight = te(reads, fallback="silent"), model[0].weight
    for grad in (weight.grad, None, torch.ones_like(weight, dtype=torch.float32)):
        weight.grad = grad
        assert run(x).item() == reads(x).item()


def test_some_of_the_layers_that_are_one_gemm():
    make, _, shape = MODELS["merged"]
    model = make().bfloat16()
    twin = with_totals(copy.deepcopy(model))
    model.k.weight.grad_dtype = torch.float32
    train(te(model), *shape)
    train(te(twin, wgrad="main_grad"), *shape)
    for name in "qkvo":
        weight, total = getattr(model, name).weight, getattr(twin, name).weight.main_grad
        assert torch.equal(weight.grad, total if name == "k" else total.bfloat16())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return nn.functional.linear(self.layer(self.embedding(x)), self.embedding.weight)


def test_other_gradients_of_the_parameter():
    """Autograd adds them up in the parameter's `grad_dtype`."""
    x, models = torch.randint(32, (16,)), [Tied().bfloat16()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    typed(models[0])
    with_totals(models[1])
    for model, options in zip(models, ({}, {"wgrad": "main_grad", "fallback": "silent"}, {}), strict=True):
        te(model, **options)(x).float().square().sum().backward()
    assert torch.equal(models[0].layer.weight.grad, models[1].layer.weight.main_grad)
    tied = models[1].embedding.weight
    assert torch.equal(models[0].embedding.weight.grad, tied.main_grad + tied.grad.float())


def test_by_autograd_itself():
    """`torch.autograd.grad` has the same, and so has a region that is checkpointed around the compiled one."""
    model = typed(nn.Sequential(nn.Linear(32, 48, bias=False)))
    run, x = te(model), torch.randn(8, 32, dtype=torch.bfloat16)
    [gradient] = torch.autograd.grad(run(x).float().square().sum(), model.parameters())
    checkpoint(run, x, use_reentrant=False).float().square().sum().backward()
    assert gradient.dtype == torch.float32 and torch.equal(gradient, model[0].weight.grad)
    with torch.autograd.graph.save_on_cpu():
        y = run(x)
    assert torch.equal(torch.autograd.grad(y.float().square().sum(), model.parameters())[0], gradient)


def test_that_wait():
    """What `backward_dw` computes has that dtype too."""
    model = mlp().bfloat16()
    twin = with_totals(copy.deepcopy(model))
    typed(model)
    train(te(model, wgrad="deferred"), 8, 32, steps=2)
    train(te(twin, wgrad="main_grad"), 8, 32, steps=2)
    backward_dw(model)
    same_as_totals(model, twin)


def test_beside_totals():
    """A parameter that has no total has its `grad_dtype`."""
    model = mlp().bfloat16()
    twin = with_totals(copy.deepcopy(model))
    with_totals(typed(model))
    del model[2].weight.main_grad
    for one in (model, twin):
        train(te(one, wgrad="main_grad", fallback="silent"), 8, 32)
    assert torch.equal(model[0].weight.main_grad, twin[0].weight.main_grad) and model[0].weight.grad is None
    assert torch.equal(model[2].weight.grad, twin[2].weight.main_grad)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kn = nn.Parameter(torch.randn(32, 48))

    def forward(self, x):
        return x @ self.kn


def test_what_is_rounded_is_said():
    model, x = typed(Transposed()), torch.randn(8, 32, dtype=torch.bfloat16)
    reason = "the parameter holds the transpose of what the GEMM computes, so that autograd rounds it"
    [unmet] = explain(model, x, options={"recipe": "current"}).unmet
    assert unmet.option == "wgrad" and unmet.reason == f"{reason} before it is torch.float32"
    with pytest.warns(FallbackWarning, match=reason):
        te(model, fallback="warn")(x).float().sum().backward()
    assert model.kn.grad.dtype == torch.float32
    assert not explain(Transposed().bfloat16(), x, options={"recipe": "current"}).unmet
