"""Models and programs as training code has them, under every recipe: dtypes, torch.autocast, adapters, attention
modules, parametrizations; modules, functions and several recipes in one process. Against the eager reference, bit for
bit, where all layers are `nn.Linear`s."""

import copy

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor import explain
from tests.eager import quantized
from tests.recipes import NAMES, quick, strict
from tests.support.autograd import DIM, X, check, loss_of, mlp, results, same, te

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")


class Norms(nn.Module):
    """Two layers, two normalizations, a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.RMSNorm(DIM)])

    def forward(self, x):
        x = x + self.first(self.norms[0](x)).relu()
        return self.second(self.norms[1](x))


# Dtypes.


@pytest.mark.sample(1)
@quick("delayed", "rowwise", "nvfp4", "block")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_models(name, dtype):
    x = torch.randn(X, dtype=dtype, requires_grad=True)
    check(Norms().to(dtype), name, x)


class Autocast(nn.Module):
    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.module(x)


@pytest.mark.sample(1)
@quick("delayed", "current", "nvfp4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_autocast(name, dtype):
    """torch.autocast stands inside the compiled function and around it: outputs of its dtype, gradients of the
    parameters' dtype."""
    model, x = Norms(), torch.randn(X, requires_grad=True)
    check(copy.deepcopy(Autocast(model, dtype)), name, x)
    expected = results(te(copy.deepcopy(Autocast(model, dtype)), name), [], x)
    with torch.autocast("cpu", dtype):
        y = te(model, name)(x)
    assert y.dtype is dtype and torch.equal(y, expected[0])
    y.square().sum().backward()
    assert torch.equal(x.grad, expected[1])
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@quick("delayed", "block", "mxfp8")
def test_both_autocasts(name):
    """Both autocasts nest in either order, and know nothing of each other."""

    def function(x):
        with te_inductor.autocast(recipe=name), torch.autocast("cpu", torch.bfloat16):
            x = model(x)
        with torch.autocast("cpu", torch.bfloat16), te_inductor.autocast(recipe=name):
            return model(x)

    model, x = nn.Sequential(nn.Linear(DIM, DIM)), torch.randn(X)
    once = te(Autocast(copy.deepcopy(model), torch.bfloat16), name)
    expected = once(once(x))
    found = te(function, "none", fallback=strict(name))(x)
    assert torch.equal(found, expected) or name == "delayed"  # a step each there, and one here


# Modules.


@quick("delayed", "block")
def test_lora(name):
    """peft's adapters on a frozen base: module paths, no GEMM for the base's weight gradients, merging and switching
    off."""
    peft = pytest.importorskip("peft")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

        def forward(self, x):
            return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    model = peft.get_peft_model(Attention(), peft.LoraConfig(r=DIM, target_modules=["q", "v"], init_lora_weights=False))
    x = torch.randn(4, 16, DIM)
    eager = quantized(model, x, options={"recipe": name})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = results(eager, [parameter for parameter in eager.parameters() if parameter.requires_grad], x)
    run = te(model, name)
    assert same(results(run, trained, x), expected)
    gemms = {}
    for site in explain(model, x, options={"recipe": name}).sites:
        gemms.setdefault(site.fqn.removeprefix("base_model.model."), []).append(site.gemm)
    assert gemms == {
        **{path: ["fprop"] for path in ("q.base_layer", "k", "v.base_layer")},
        **{f"{path}.lora_A.default": ["fprop", "wgrad"] for path in "qv"},
        **{f"{path}.lora_B.default": ["fprop", "dgrad", "wgrad"] for path in "qv"},
        "o": ["fprop", "dgrad"],
    }
    with model.disable_adapter(), torch.no_grad():
        without = te(model, name, fallback="silent")(x)
    assert without.shape == x.shape and not torch.equal(without, expected[0])


@pytest.mark.sample(1)
@quick("delayed", "rowwise")
@pytest.mark.parametrize("train", [True, False])
def test_attention_modules(name, train):
    """Every projection is found."""
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True).train(train)
    x = torch.randn(2, 16, DIM)
    sites = explain(layer, x, options={"recipe": name}).sites
    assert {site.fqn for site in sites} == {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    assert {site.kernel for site in sites} & {"high_precision"} == set()
    y = te(layer, name)(x)
    y.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert not torch.equal(y, layer(x))

    attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
    assert {site.fqn for site in explain(attention, x, x, x, options={"recipe": name}).sites} == {"", "out_proj"}
    y, weights = te(attention, name)(x, x, x)
    y.square().sum().backward()
    assert attention.in_proj_weight.grad.isfinite().all() and weights.shape == (2, 16, 16)


@pytest.fixture
def fast_path():
    yield torch.backends.mha.set_fastpath_enabled
    torch.backends.mha.set_fastpath_enabled(True)


PADDING, ABOVE = torch.arange(16) > torch.tensor([[9], [12]]), torch.ones(16, 16).triu(1).bool()
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "triangle": {"src_mask": ABOVE},
    "both": {"src_mask": ABOVE, "src_key_padding_mask": PADDING},
}


@pytest.mark.sample(1)
@quick("delayed", "current", "mxfp8", "nvfp4")
@pytest.mark.parametrize("mask", MASKS)
def test_the_fast_path_of_an_encoder_layer(name, mask, fast_path):
    """The layer is in evaluation without gradients: one op of torch's, in which every projection is found all the
    same."""
    layer = nn.TransformerEncoderLayer(
        DIM, 4, 2 * DIM, batch_first=True, activation="gelu", norm_first=mask == "padding"
    )
    model, x, found = nn.ModuleDict({"layer": layer.eval()}), torch.randn(2, 16, DIM), {}

    def call(x):
        return model["layer"](x, **MASKS[mask])

    with torch.no_grad():
        expected, plain = call(x), te(call, "none")(x)
        for fast in (True, False):
            fast_path(fast)
            torch._dynamo.reset()
            sites = explain(call, x, options={"recipe": name}).sites
            paths = ["self_attn", "self_attn.out_proj", "linear1", "linear2"]
            assert [site.fqn for site in sites] == [f"layer.{path}" for path in paths]
            assert {site.kernel for site in sites} & {"high_precision"} == set()
            found[fast] = te(call, name, fallback="silent")(x)
    torch.testing.assert_close(plain, expected)
    assert plain.stride() == expected.stride() == found[True].stride()
    assert torch.equal(found[True], found[False]) and not torch.equal(found[True], plain)


@pytest.mark.sample(1)
@quick("delayed", "rowwise", "block")
@pytest.mark.parametrize(
    "parametrize",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
    ids=lambda function: function.__name__,
)
def test_parametrizations(name, parametrize):
    """The weight is computed; its gradient reaches what it is computed from. Delayed scaling keeps its state with a
    parameter, which the weight has to come from by itself: torch's orthogonal weights come from a subclass of none."""
    model, x = nn.Sequential(parametrize(nn.Linear(DIM, DIM))).eval(), torch.randn(X, requires_grad=True)
    if (name, parametrize.__name__) == ("delayed", "orthogonal"):
        [reason] = {site.reason for site in explain(model, x, options={"recipe": name}).sites}
        assert "keeps its state with a parameter" in reason
    else:
        check(model, name, x)


# Programs.


@quick("delayed", "current", "nvfp4")
def test_a_module_of_a_model(name):
    """Compiled alone, between layers that nobody compiles."""
    model, x = nn.Sequential(nn.Linear(DIM, DIM), mlp(), nn.Linear(DIM, DIM)), torch.randn(X)
    inner = quantized(model[1], x, options={"recipe": name})
    eager = nn.Sequential(copy.deepcopy(model[0]), inner, copy.deepcopy(model[2]))
    expected = results(eager, list(eager.parameters()), x)
    assert not torch.equal(expected[0], model(x))
    model[1] = te(model[1], name)
    assert same(results(model, list(model.parameters()), x), expected)


@quick("delayed", "rowwise", "mxfp4")
def test_a_function(name):
    """torch.compile is a decorator, over parameters that are arguments."""
    model, x = mlp(), torch.randn(X)

    @torch.compile(backend="te", fullgraph=True, options={"recipe": name, "fallback": strict(name)})
    def function(x, first, second):
        return second(nn.functional.gelu(first(x)))

    eager = quantized(model, x, options={"recipe": name})
    parameters = list(model.parameters())
    found = results(lambda x: function(x, model[0], model[2]), parameters, x)
    assert same(found, results(eager, list(eager.parameters()), x))


def test_every_recipe_in_one_process():
    """One model under all of them, in turn and again, without a reset: each computes what it does alone."""
    model, x = mlp(), torch.randn(X)
    alone, runs = {}, {}
    for name in NAMES:
        torch._dynamo.reset()
        alone[name] = loss_of(te(copy.deepcopy(model), name), x)
    torch._dynamo.reset()
    for _ in range(2):
        for name in NAMES:
            twin = model if name != "delayed" else copy.deepcopy(model)
            if name not in runs or name == "delayed":
                runs[name] = te(twin, name)
            assert torch.equal(loss_of(runs[name], x), alone[name])
    assert len({loss.item() for loss in alone.values()}) > 1


@pytest.mark.parametrize(
    "other",
    [name if name in ("delayed", "current") else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES],
)
def test_two_models_share_no_state(other):
    """The models are of one class, so that one compiled code serves both: what one sees does not change the other."""
    models = [mlp() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lone = copy.deepcopy(models[0])
    batches = [torch.randn(X) for _ in range(3)]
    expected = stepped(te(lone, "delayed"), lone, batches)
    runs = [te(models[0], "delayed"), te(models[1], other)]
    found = []
    for x in batches:
        found += stepped(runs[0], models[0], [x])
        stepped(runs[1], models[1], [100 * x])
    assert same(found, expected)
    mine, theirs = (te_inductor.state_dict(model) for model in models)
    assert bool(theirs) == (other == "delayed") and mine
    if theirs:
        assert not any(torch.equal(mine[key], theirs[key]) for key in mine if key.endswith("input.scale"))


def stepped(run, model, batches):
    losses = []
    for x in batches:
        model.zero_grad()
        loss = loss_of(run, x)
        loss.backward()
        losses.append(loss)
    return losses
