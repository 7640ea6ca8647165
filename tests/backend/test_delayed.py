"""Delayed scaling in programs: where state belongs, when it changes, what shares it, and what recompiles leave of it.

The numbers of one layer are in tests/numerics/test_delayed.py; here each program is held to the oracle where it knows what
enters a layer, and to another program of the same numbers elsewhere.
"""

import copy
import gc
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_inductor
from te_inductor import backend, explain
from te_inductor.errors import FallbackError, FallbackWarning, RecipeError
from te_inductor.recipes import DelayedScaling, Format
from tests.backend.test_saved_state import Attention, mlp, same, train
from tests.delayed import OracleLayer, check_entry, quantizers

pytestmark = pytest.mark.usefixtures("without_codegen")

RECIPE = DelayedScaling(amax_history_len=4)


def te(model, **options):
    options = {"recipe": RECIPE, "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return te_inductor.state_dict(model)


class Steps:
    """One layer, the oracle beside it: `forward` and `backward` in whatever order, checked after each."""

    def __init__(self, layer: nn.Linear, run) -> None:
        self.layer, self.run, self.oracle = layer, run, OracleLayer(RECIPE)

    def forward(self, x: Tensor) -> tuple:
        scales = {slot: history.scale for slot, history in self.oracle.of.items()}
        x = x.clone().requires_grad_()
        y = self.run(x)
        self.oracle.forward(x.detach(), self.layer.weight.detach())
        self.check_state()
        return scales, x, y

    def backward(self, scales, x, y, **options) -> None:
        dy = torch.randn_like(y)
        self.layer.zero_grad()
        x.grad = None
        y.backward(dy, **options)
        self.oracle.backward(dy)
        self.check_state()
        weight, bias = self.layer.weight, self.layer.bias
        grads = [x.grad, weight.grad, bias.grad]
        self.oracle.check_results(scales, x.detach(), weight.detach(), bias.detach(), dy, y.detach(), grads)

    def check_state(self) -> None:
        self.oracle.check_state(state(self.layer))


def steps(**options) -> Steps:
    layer = nn.Linear(32, 48)
    return Steps(layer, te(layer, **options))


@pytest.mark.codegen
def test_microbatches_forward_forward_backward_backward():
    """Each backward computes with the scales that its own forward read, and records into the state as it now is."""
    layer = steps()
    layer.backward(*layer.forward(torch.randn(8, 32)))
    for _ in range(2):
        first = layer.forward(torch.randn(8, 32))
        second = layer.forward(torch.randn(8, 32) * 8)
        layer.backward(*first)
        layer.backward(*second)


@pytest.mark.codegen
def test_microbatches_backward_in_reverse():
    layer = steps()
    first = layer.forward(torch.randn(8, 32))
    second = layer.forward(torch.randn(8, 32) * 8)
    layer.backward(*second)
    layer.backward(*first)


@pytest.mark.codegen
def test_retain_graph():
    """Twice through one backward: the same scales, two updates."""
    layer = steps()
    with functorch.patch(
        donated_buffer=False
    ):  # torch refuses retain_graph where a cache has a backward compiled without
        for _ in range(2):
            run = layer.forward(torch.randn(8, 32))
            layer.backward(*run, retain_graph=True)
            layer.backward(*run, retain_graph=True)


def test_state_survives_recompiles():
    """Other batch sizes, then symbolic ones, evaluation and training in between, another shape of x."""
    counters.clear()
    layer = steps()
    for batch in (8, 16, 24, 40):
        layer.backward(*layer.forward(torch.randn(batch, 32)))
    layer.layer.eval()
    layer.backward(*layer.forward(torch.randn(8, 32)))
    with torch.no_grad():
        before = state(layer.layer)
        layer.run(torch.randn(8, 32) * 100)
        assert same(state(layer.layer), before)
    layer.layer.train()
    layer.backward(*layer.forward(torch.randn(12, 32)))
    assert 2 <= counters["stats"]["unique_graphs"] <= 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_changes(mode):
    model = mlp()
    run = te(model)
    train(run)
    before = state(model)
    x = torch.randn(8, 32) * 100
    with mode():
        first, second = run(x), run(x)
    assert torch.equal(first, second) and same(state(model), before)
    train(run)
    assert not same(state(model), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_state_made_without_gradients_can_be_trained(mode):
    model = mlp()
    run = te(model, fallback="silent")
    with mode():
        run(torch.randn(8, 32))
    train(run, 2)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert all(value.item() != 1 for key, value in state(model).items() if key.endswith("scale"))


def test_two_models_share_no_state_though_they_run_the_same_code():
    """Dynamo compiles a class once: the graph must find the state of the module that it is called for."""
    counters.clear()
    layers = [nn.Linear(32, 48) for _ in range(3)]
    runs = [Steps(layer, te(layer)) for layer in layers]
    for run in [*runs, *reversed(runs)]:
        run.backward(*run.forward(torch.randn(8, 32) * torch.rand(()) * 9))
    assert counters["stats"]["unique_graphs"] == 1
    for run in runs:
        run.check_state()


def test_blocks_compiled_one_by_one():
    """`for block in model: block.compile(...)`: one graph serves all, each with its own state, as if compiled whole."""
    counters.clear()
    whole = nn.Sequential(*(Blocks(number=1) for _ in range(10)))
    blocks = copy.deepcopy(whole)
    for block in blocks:
        block.compile(backend="te", fullgraph=True, options={"recipe": RECIPE, "fallback": "error"})
    for _ in range(2):
        train(blocks, x=torch.full((8, 32), 3.0))
    assert counters["stats"]["unique_graphs"] <= 3  # the first one's input needs no gradient, the loss asks for others'
    torch._dynamo.reset()
    run = te(whole)
    for _ in range(2):
        train(run, x=torch.full((8, 32), 3.0))
    assert same(state(blocks), state(whole))


def test_a_copy_of_a_model_starts_anew():
    model = mlp()
    train(te(model))
    other = copy.deepcopy(model)
    assert state(other) == {} and state(model)


def test_one_model_compiled_twice_has_one_state():
    layer = nn.Linear(32, 48)
    first = Steps(layer, te(layer))
    second = Steps(layer, te(layer, epilogue_fusion=False))
    second.oracle = first.oracle
    for run in (first, second, first):
        run.backward(*run.forward(torch.randn(8, 32)))


def test_state_dies_with_its_model():
    from te_inductor.runtime import state as store

    def held() -> int:
        gc.collect()
        return len(store._states)

    before = held()
    model = mlp()
    run = te(model)
    train(run)
    assert held() == before + 2
    del run, model
    torch._dynamo.reset()
    assert held() == before


def amax_scale(amax: Tensor, element: float = 448.0) -> float:
    return (torch.tensor(element) / amax.float().max()).item()


def test_readers_of_one_tensor_share_its_quantizer():
    """q, k and v: one cast of x, one record of it, one scale under three keys."""
    model, x = Attention(), torch.randn(2, 8, 32)
    train(te(model), x=x)
    entries = state(model)
    assert {entries[f"{name}.input.scale"].item() for name in "qkv"} == {amax_scale(x.abs())}
    assert entries["o.input.scale"] != entries["q.input.scale"]


class Parallel(nn.Module):
    """Two layers of one input; `together` decides whether they may be one GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x, together):
        a, b = self.a(x), self.b(x)
        return (a.relu() + b.relu()) if together else (a.relu() + b.relu(), a, b)


def test_layers_that_are_one_gemm_in_one_graph_and_two_in_another():
    """As in training and in generation with a cache, whose outputs are returned: the second finds the first one's scales."""
    model, x = Parallel(), torch.randn(8, 32)
    with torch.no_grad():
        model.b.weight *= 8
    run = te(model)
    run(x, True).sum().backward()
    entries = state(model)
    scales = {entries[f"{name}.weight.scale"].item() for name in "ab"}
    assert scales == {amax_scale(model.b.weight.detach().abs())}  # both, as one GEMM has one scale
    with torch.no_grad():
        _, a, b = run(x, False)
    for name, y in (("a", a), ("b", b)):
        assert (y - F.linear(x, getattr(model, name).weight)).norm() < 0.1 * y.norm(), name
    assert same(state(model), entries)


@pytest.mark.codegen
def test_layers_that_were_apart_are_joined():
    """Both saw something: the larger amaxes and the smaller scale hold."""
    model, x = Parallel(), torch.randn(8, 32)
    with torch.no_grad():
        model.b.weight *= 8
    run = te(model)
    sum(y.sum() for y in run(x, False)).backward()
    apart = state(model)
    assert apart["a.weight.scale"] != apart["b.weight.scale"]
    with torch.no_grad():
        run(x, True)
    joined = state(model)
    for field in ("scale", "amax_history"):
        assert torch.equal(joined[f"a.weight.{field}"], apart[f"b.weight.{field}"])
        assert torch.equal(joined[f"b.weight.{field}"], apart[f"b.weight.{field}"])
    sum(y.sum() for y in run(x, False)).backward()  # the other graph goes on with the joined state
    after = state(model)
    assert after["a.weight.amax_history"][-2:].tolist() == [joined["b.weight.amax_history"][-1].item()] * 2
    assert torch.equal(after["a.weight.amax_history"], after["b.weight.amax_history"])


def test_a_module_called_twice_has_one_quantizer():
    """One update a step, of the larger amax."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return self.layer(x) + self.layer(4 * x)

    model, oracle = Twice(), quantizers(RECIPE)
    run = te(model)
    for _ in range(2):
        x = torch.randn(8, 32)
        y = run(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        for tensor in (x, 4 * x):
            oracle["input"].record(tensor)
        oracle["weight"].record(model.layer.weight.detach())
        oracle["grad_output"].record(dy)
        for slot, history in oracle.items():
            history.update()
            check_entry(state(model), f"layer.{slot}", history)


def test_tied_weights():
    """One state of the weight, an input and a gradient each."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    model, x = Tied(), torch.randn(8, 32)
    train(te(model), x=x)
    entries = state(model)
    assert [key for key in entries if ".weight." in key] == ["first.weight.scale", "first.weight.amax_history"]
    assert entries["first.input.scale"].item() == amax_scale(x.abs())
    assert entries["second.input.scale"] != entries["first.input.scale"]
    assert entries["second.grad_output.scale"] != entries["first.grad_output.scale"]


def test_slices_of_a_batched_product():
    """Experts: each slice is a layer of its own, as the oracle's."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 32, 48) * torch.tensor([1.0, 100.0, 0.01])[:, None, None])

        def forward(self, x):
            return torch.bmm(x, self.w)

    model = Experts()
    run, oracles = te(model), [OracleLayer(RECIPE) for _ in range(3)]
    for _ in range(2):
        x = torch.randn(3, 8, 32, requires_grad=True)
        model.w.grad = None
        y = run(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        for i, oracle in enumerate(oracles):
            grads = [x.grad[i], model.w.grad[i].t(), None]
            oracle.check(x[i].detach(), model.w[i].detach().t(), None, dy[i], y[i].detach(), grads)
            oracle.check_state(state(model), f"w[select_0_{i}].")


class Blocks(nn.Module):
    """Some blocks, plain or under a checkpoint."""

    def __init__(self, wrap=None, number: int = 2) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList(mlp() for _ in range(number)), wrap

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return x


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "scaled_mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_casts(ctx, op, *args, **kwargs):
    recompute = "quantize" in str(op) or "gelu" in str(op)
    return CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.PREFER_SAVE


WRAPS = {
    "full": partial(checkpoint, use_reentrant=False),
    "products saved": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "casts recomputed": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, recompute_casts)
    ),
}


def trained_steps(model: nn.Module, run, number: int = 3) -> list:
    torch.manual_seed(1)
    results = []
    for _ in range(number):
        model.zero_grad()
        x = torch.randn(8, 32, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *state(model).values()])
    return results


def equal_steps(first: list, second: list) -> bool:
    return all(torch.equal(*pair) for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", WRAPS)
def test_activation_checkpointing_changes_nothing(kind):
    """Bit for bit, state included: what the backward computes again it casts with the scales of the forward, and it records
    nothing twice."""
    plain = Blocks()
    wrapped = copy.deepcopy(plain)
    wrapped.wrap = WRAPS[kind]
    expected = trained_steps(plain, te(plain))
    torch._dynamo.reset()
    assert equal_steps(trained_steps(wrapped, te(wrapped)), expected)


@pytest.mark.parametrize("trains", ["input", "first", "second", "bias", "nothing"])
def test_frozen_layers_have_scales_all_the_same(trains):
    """Where gradients are enabled every layer records what it casts, whether its own weight or input needs one or not."""
    model = mlp().requires_grad_(False)
    x = torch.randn(8, 32)
    for needs in {"input": [x], "first": model[0].parameters(), "second": model[2].parameters(), "nothing": []}.get(
        trains, [model[2].bias]
    ):
        needs.requires_grad_()
    run = te(model)
    y = run(x)
    if y.requires_grad:
        y.square().sum().backward()
    entries = state(model)
    assert entries["0.input.scale"].item() == amax_scale(x.detach().abs())
    for name in ("0", "2"):
        weight = model[int(name)].weight.detach()
        assert entries[f"{name}.weight.scale"].item() == amax_scale(weight.abs())
    expected = {"input": {"0", "2"}, "first": {"0", "2"}, "second": {"2"}, "bias": {"2"}, "nothing": set()}[trains]
    assert {key.split(".")[0] for key in entries if "grad_output" in key} == expected
    high = model(x)
    assert (run(x) - high).norm() < 0.1 * high.norm()


def test_a_teacher_under_no_grad_keeps_its_scales():
    """In the same graph as the student, which moves on."""

    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = mlp(), mlp()

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    model = Distillation()
    train(te(model.teacher))
    before = state(model.teacher)
    train(te(model), x=100 * torch.randn(8, 32))
    after = state(model.teacher)
    # They read one tensor, so its quantizer is one, and the student has seen it.
    assert after.pop("0.input.scale") < before.pop("0.input.scale")
    after.pop("0.input.amax_history"), before.pop("0.input.amax_history")
    assert same(after, before)


def test_graph_breaks():
    """Two graphs, the same numbers as one."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x):
            x = self.first(x)
            if self.breaks:
                torch._dynamo.graph_break()
            return self.second(x)

    whole = Broken()
    whole.breaks = False
    broken = copy.deepcopy(whole)
    broken.breaks = True
    expected = trained_steps(whole, te(whole))
    torch._dynamo.reset()
    run = torch.compile(broken, backend="te", options={"recipe": RECIPE, "fallback": "error"})
    assert equal_steps(trained_steps(broken, run), expected)


@pytest.mark.parametrize("train_mode", [True, False])
def test_dynamic_shapes(train_mode):
    """At most two compiles; the amaxes are those of the batches seen."""
    model = Attention()
    run, oracle = te(model), quantizers(RECIPE)["input"]
    train(run, x=torch.randn(2, 4, 32))
    oracle.record(torch.zeros(1)), oracle.update()
    counters.clear()
    seen = []
    for batch in (8, 16, 24, 40):
        x = torch.randn(batch, 5, 32)
        with torch.set_grad_enabled(train_mode):
            y = run(x)
        if train_mode:
            y.sum().backward()
            seen.append(x.abs().max().item())
    assert counters["stats"]["unique_graphs"] <= 2
    history = state(model)["q.input.amax_history"].tolist()
    assert history[4 - len(seen[-3:]) :] == seen[-3:] if train_mode else history[3] > 0 == history[2]


def test_autocast():
    """The state is that of what the model holds; the output has autocast's dtype."""
    layer = nn.Linear(32, 48)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    x = torch.randn(8, 32)
    y = te(function)(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and state(layer)["input.scale"].item() == amax_scale(x.abs())


def warned(run, *inputs) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*inputs)
    return [str(entry.message) for entry in caught if entry.category is FallbackWarning]


def test_inference_without_any_state_is_said_once():
    model, x = mlp(), torch.randn(8, 32)
    run = te(model, fallback="warn")
    with torch.no_grad():
        [text] = warned(run, x)
        assert "has seen no step of these sites" in text and "cast with scale 1: 2, 0;" in text
        assert "train first, or load what te_inductor.state_dict returned with te_inductor.load_state_dict" in text
        assert warned(run, x) == []
        torch._dynamo.reset()
        assert warned(te(model, fallback="silent"), x) == []
        torch._dynamo.reset()
        with pytest.raises(FallbackError, match="cast with scale 1"):
            te(model)(x)


@pytest.mark.parametrize("how", ["train", "load"])
def test_inference_with_state_says_nothing(how):
    model, x = mlp(), torch.randn(8, 32)
    train(te(model))
    if how == "load":
        model, entries = mlp(), state(model)
        te_inductor.load_state_dict(model, entries)
    with torch.no_grad():
        assert warned(te(model, fallback="warn"), x) == []
        assert warned(te(model), x) == []


def test_a_training_graph_says_nothing():
    model = mlp()
    assert warned(te(model, fallback="warn"), torch.randn(8, 32)) == []


def test_a_weight_that_comes_from_no_parameter_is_refused():
    def function(x, weight):
        return F.linear(x, weight)

    x, weight = torch.randn(8, 32), torch.randn(48, 32)
    report = explain(function, x, weight, options={"recipe": "delayed"})
    assert {site.kernel for site in report.sites} == {"high_precision"}
    assert all(
        "keeps its state with a parameter, and the weight comes from none" in site.reason for site in report.sites
    )
    run = torch.compile(function, backend="te", options={"recipe": "delayed", "fallback": "silent"})
    torch.testing.assert_close(run(x, weight), function(x, weight))


def test_a_site_in_a_control_flow_body_is_refused():
    model = mlp()

    def function(x):
        return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: model(-x), (x,))

    report = explain(function, torch.randn(8, 32), options={"recipe": "delayed"})
    assert report.sites and all("inside a control-flow body" in site.reason for site in report.sites)
    assert explain(function, torch.randn(8, 32), options={"recipe": "current"}).fallbacks == []


@pytest.mark.parametrize("where", ["pass", "compile"])
def test_a_failure_leaves_nothing_behind(where, monkeypatch):
    """State inputs and operands of checkpoint bodies are gone from the graph that compiles in the end."""
    from te_inductor import compat

    seen, real = [], compat.compile_fx

    def spy(gm, inputs, *rest):
        modules = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
        names = [str(node.target) for module in modules for node in module.graph.nodes]
        names += [name for name, _ in gm.named_buffers()]
        seen.append((sum("te_" in name for name in names), len(inputs)))
        if where == "compile" and len(seen) == 1:
            raise RuntimeError("injected")
        return real(gm, inputs, *rest)

    def broken(plan):
        backend.rewrite_sites(plan)
        raise RuntimeError("injected")

    monkeypatch.setattr(compat, "compile_fx", spy)
    if where == "pass":
        monkeypatch.setattr(backend.run_passes, "__defaults__", ((*backend.DECIDE, broken),))
    model = Blocks(WRAPS["full"])
    run = torch.compile(model, backend="te", options={"recipe": RECIPE})
    x = torch.randn(8, 32, requires_grad=True)
    with pytest.warns(FallbackWarning, match="injected"):
        y = run(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
    assert seen[-1] == (0, 1 + len(list(model.parameters())))
    if where == "compile":
        assert seen[0][0] > 0 and seen[0][1] > seen[1][1]
    assert state(model) == {}


def closing_over(number):
    def algorithm(history):
        return history.amax(0) * number

    return algorithm


def double(history):
    return history.amax(0) * 2


def test_functions_in_a_recipe():
    with pytest.raises(RecipeError, match=r"closes over number.* expected a function without a closure"):
        DelayedScaling(amax_compute_algo=closing_over(2))
    with pytest.raises(RecipeError, match="a number, string, enum member, tuple, Constant or plain function"):
        DelayedScaling(amax_compute_algo=torch.amax)

    def edited(history):
        return history.amax(0) * 3

    edited.__qualname__, edited.__module__ = double.__qualname__, double.__module__
    first, second = (DelayedScaling(amax_compute_algo=function).__fx_repr__() for function in (double, edited))
    assert first[0] != second[0]
    again = DelayedScaling(amax_compute_algo=double)
    assert again.__fx_repr__()[0] == first[0] and again == DelayedScaling(amax_compute_algo=double)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin": 1.0}, "margin is a float"),
        ({"margin": True}, "margin is a bool"),
        ({"margin": -1}, "margin is -1, expected 0 to 64"),
        ({"fp8_format": "HYBRID"}, "fp8_format is a str"),
        ({"amax_history_len": 0}, "amax_history_len is 0, expected 1 or more"),
        ({"amax_history_len": 1.0}, "amax_history_len is a float"),
        ({"amax_compute_algo": "mx"}, "unknown DelayedScaling.amax_compute_algo 'mx'; did you mean 'max'"),
        ({"amax_compute_algo": 3}, "unknown DelayedScaling.amax_compute_algo 3"),
        ({"scaling_factor_compute_algo": "max"}, "scaling_factor_compute_algo is a str"),
        ({"reduce_amax": 1}, "reduce_amax is a int"),
        ({"fp8_dpa": True}, "fp8_dpa is set, expected False"),
        ({"fp8_mha": 1}, "fp8_mha is set, expected False"),
    ],
)
def test_fields_are_checked(fields, text):
    with pytest.raises(RecipeError, match=text):
        DelayedScaling(**fields)


def test_defaults_are_transformer_engines():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.reduce_amax) == ("max", None, True)
    assert (recipe.fp8_dpa, recipe.fp8_mha) == (False, False)
