"""Activation memory budgets, torch's own knob between saving and computing again: the same results bit for bit under
every recipe, products computed again last, and state read once. And the FLOPs by which torch weighs them."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import te_inductor
from te_inductor.eager_layers import Linear
from te_inductor.ops import flops
from te_inductor.passes.joint import recompute
from tests.recipes import every_recipe, every_stateless_recipe, quick, strict
from tests.support.autograd import same
from tests.support.oracle_layers import Calls

pytestmark = pytest.mark.usefixtures("without_codegen", "one_seed")

DIM, STEPS = 128, 3
X = (256, DIM)
REGION = getattr(torch.autograd.graph, "region_activation_memory_budget", None)  # from torch 2.13


class Block(nn.Module):
    """Merged layers, norms, attention written out and as torch's module: what a rewrite merges, opens and adds to."""

    def __init__(self, budget: float | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.budget = budget

    def forward(self, x):
        if self.budget is None:
            return self.body(x)
        with REGION(self.budget):
            return self.body(x)

    def body(self, x):
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (2, -1)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.attention(x, x, x, need_weights=False)[0]


def train(model: nn.Module, recipe, **options) -> tuple[list[torch.Tensor], Counter]:
    """The gradients of a few steps, which change scales and weights, and the GEMMs of the last backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = torch.compile(
        model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": {"*": recipe}, **options}
    )
    found: list[torch.Tensor] = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        x = (torch.randn(2, *X) * (1 + step)).requires_grad_()
        loss = run(x).square().sum()
        with Calls(of=lambda op, args: args[5].name if op == "scaled_mm" else None) as calls:
            loss.backward()
        found += [x.grad, *(p.grad.clone() for p in trained)]
        with torch.no_grad():
            for p in trained:
                p -= 1e-3 * p.grad.clamp(-1, 1)
                p.grad = None
    return found, Counter(calls.names)


@quick("current")
def test_budgets(name):
    """More of the nine products are computed again as the budget falls, down to nearly all; nothing else changes. Of
    nvfp4, whose copies are small beside outputs, four at once: torch weighs what an op returns, needed or not."""
    model = Block()
    # Kept copies are inputs, of which the budget knows nothing.
    options = {"fallback": strict(name), "weights": "each_call"}
    expected, products = train(copy.deepcopy(model), name, **options)
    assert "fprop" not in products
    again = []
    for budget in (0.9, 0.0):
        with functorch.patch(activation_memory_budget=budget):
            found, products = train(copy.deepcopy(model), name, **options)
        assert same(found, expected)
        again.append(products["fprop"])
    assert again == sorted(again) and again[0] <= (4 if name in ("nvfp4", "mxfp4") else 2) < again[-1], again


class Norm(nn.Module):
    """Written out, as in transformers' models."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Roots(TorchDispatchMode):
    """Counts reciprocal square roots."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.rsqrt.default
        return func(*args, **(kwargs or {}))


@pytest.mark.quick("True")
@pytest.mark.parametrize("saves", [True, False])
def test_statistics_are_saved(saves, monkeypatch):
    """A number a row is no memory, and a tensor to read again: under a budget torch would."""
    if not saves:
        monkeypatch.setattr(recompute, "_save_statistics", lambda *_: None)
    torch._dynamo.reset()
    model = Block()
    model.norms = nn.ModuleList([Norm(), Norm()])
    with functorch.patch(activation_memory_budget=0.5):
        run = torch.compile(model, backend="te", options={"policy": {"*": "current"}})
        loss = run(torch.randn(2, *X)).square().sum()
        with Roots() as roots:
            loss.backward()
    assert roots.count == (0 if saves else 2)


class Dropping(nn.Module):
    """Dropouts, one of them attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = F.dropout(F.gelu(self.up(x)), 0.5)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(-2, -3).flatten(-2)
        return F.dropout(self.down(x), 0.5)


class Writing(nn.Module):
    """Weights changed before their use, and behind it, which torch refuses where the backward reads them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        with torch.no_grad():
            self.down.weight.mul_(-0.5)
        x = self.down(F.gelu(self.up(x)))
        with torch.no_grad():
            self.up.weight.mul_(0.75)
        return x


@pytest.mark.quick("current-Writing-0.0", "delayed-Dropping-0.1")
@pytest.mark.parametrize("budget", [0.5, 0.1, 0.0])
@pytest.mark.parametrize("program", [Dropping, Writing])
@pytest.mark.parametrize("name", ["current", "delayed", "rowwise"])
def test_the_backward_finds_what_the_forward_did(name, program, budget):
    """torch by itself has it drop something else, and read what has been written since (pytorch/pytorch#190758,
    #197039)."""
    model = program()
    expected, _ = train(copy.deepcopy(model), name, fallback="error")
    with functorch.patch(activation_memory_budget=budget):
        found, _ = train(copy.deepcopy(model), name, fallback="error")
    assert same(found, expected)


class WritingLists(nn.Module):
    """A weight read and then changed as lists, before the one layer in low precision. The backward needs nothing that is
    worth computing again: the lists, which take more room than the inputs, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 30, requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            products = torch._foreach_mul([self.weight] * 8, [float(n) for n in range(1, 9)])
            torch._foreach_mul_([self.weight], -0.5)
        for product in products:
            x = F.linear(x, product)
        return self.head(x)


@pytest.mark.quick("0.5-True")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_lists_are_saved_where_nothing_is_to_weigh(budget, dynamic):
    """torch would save a list as such before 2.14, or nothing of it where sizes are symbolic
    (pytorch/pytorch#188014)."""
    model = WritingLists()
    options = {"policy": {"head": "delayed", "*": "none"}}
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        expected, _ = train(copy.deepcopy(model), "delayed", **options)
        with functorch.patch(activation_memory_budget=budget):
            found, _ = train(copy.deepcopy(model), "delayed", **options)
    assert same(found, expected)


@pytest.mark.quick("0.5-delayed")
@every_recipe
@pytest.mark.skipif(REGION is None, reason="torch 2.13 has it first")
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_budgets_of_regions(name, budget):
    """torch refuses a graph of which some op is not in the region: ours are, whatever was merged, opened or added."""
    model = Block()
    expected, _ = train(copy.deepcopy(model), name, fallback=strict(name))
    model.budget = budget
    found, products = train(copy.deepcopy(model), name, fallback=strict(name))
    assert same(found, expected) and products["fprop"]


@pytest.mark.quick("current-{'wgrad': 'deferred'}", "delayed-{'weights': 'once'}", "delayed-{'wgrad': 'main_grad'}")
@pytest.mark.parametrize("options", [{"weights": "once"}, {"wgrad": "main_grad"}, {"wgrad": "deferred"}], ids=str)
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_with_other_options(name, options):
    def gradients(budget):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p)
        with functorch.patch(activation_memory_budget=budget):
            run = torch.compile(
                model,
                backend="te",
                options={"recipe": name, "policy": {"*": name}, "fallback": "error", **options},
            )
            for step in range(STEPS):
                run(torch.randn(X) * (1 + step)).square().sum().backward()
        te_inductor.backward_dw(model)
        return [tensor for p in model.parameters() for tensor in (p.main_grad, p.grad) if tensor is not None]

    assert same(gradients(0.0), gradients(1.0))


@pytest.mark.codegen
@pytest.mark.thorough
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_delayed_scaling_in_generated_code(budget):
    """Delayed scaling updates scales without autograd's noticing: read again in the backward they would be the next
    step's. Gradients were off by up to 99% so."""
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.RMSNorm(2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
    expected, _ = train(copy.deepcopy(model), "delayed", fallback="error")
    with functorch.patch(activation_memory_budget=budget):
        found, _ = train(copy.deepcopy(model), "delayed", fallback="error")
    # What is fused otherwise may round otherwise: as if one value in 64 were a step of E4M3, 2^-3, away.
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2**-6 * b.norm()


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.usefixtures("no_caches")
def test_scales_that_torch_does_not_save_are_an_error(monkeypatch):
    monkeypatch.setattr(recompute, "_save_what_changes", lambda *_: None)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    with functorch.patch(activation_memory_budget=0.0), pytest.raises(Exception, match="read again by the backward"):
        train(model, "delayed", fallback="error")


@every_stateless_recipe
def test_flops_of_a_layer(name):
    m, n, k = 32, 48, 64
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        Linear(name)(x, weight, None).sum().backward()
    padded = 128 if name == "block" else 32 if name in ("mxfp8", "mxfp4", "nvfp4") else 16
    up = lambda size: -(-size // padded) * padded  # noqa: E731
    assert counted.get_total_flops() == 2 * (m * n * up(k) + m * k * up(n) + n * k * up(m))


def test_flops_of_a_stored_weight():
    layer = te_inductor.quantize_(nn.Linear(DIM, 2 * DIM, bias=False), "nvfp4_weight_only")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        layer(torch.randn(4, DIM))
    assert counted.get_total_flops() == 2 * 4 * DIM * 2 * DIM


@pytest.mark.parametrize("name", flops.ATTENTION)
def test_attention_is_not_for_free(name):
    """A product of a hundredth of its FLOPs is computed again before it. Grouped queries, where an op takes them."""
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    more = {"attn_bias": None, "compute_log_sumexp": True} if name in ("efficient_attention", "cudnn_attention") else {}
    heads, graphs = (4, 4, 4) if name == "efficient_attention" else (4, 2, 2), []

    def keep(gm, _):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def attend(x, w):
        q, k, v = (x @ w).unflatten(-1, (-1, 16)).transpose(1, 2).split(heads, 1)
        return attention(q, k, v, is_causal=True, **more)[0].transpose(1, 2).flatten(2).sin()

    budget = functorch.patch(activation_memory_budget=0.5)
    with FakeTensorMode(), budget, flops.weighed():
        x, w = torch.randn(2, 8192, 64, requires_grad=True), torch.randn(64, 16 * sum(heads), requires_grad=True)
        aot_function(attend, keep, keep, min_cut_rematerialization_partition)(x, w).sum().backward()
    assert [len(graph.find_nodes(op="call_function", target=attention)) for graph in graphs] == [1, 0]
    assert functorch.is_non_builtin_to_include is False
