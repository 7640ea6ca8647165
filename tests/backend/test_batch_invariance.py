"""options={"batch_invariant": True}: what a row's numbers depend on, and what is refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from te_inductor import explain
from te_inductor.backend import parse
from te_inductor.errors import OptionError
from te_inductor.recipes import CustomRecipe, Quantizer
from te_inductor.runtime.eager.fixed_order import fixed_mm
from tests.support.invariant_models import Decoder, generated

INVARIANT = {"batch_invariant": True}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.head = nn.RMSNorm(256), nn.Linear(256, 128), nn.Linear(128, 40, bias=False)
        self.gate = nn.Linear(128, 128)

    def forward(self, x):
        h = F.silu(self.inner(self.norm(x)))
        return self.head(F.layer_norm(h + F.gelu(self.gate(h)), (128,))).float().log_softmax(-1)


def compiled(model: nn.Module, recipe: object, **options: object):
    return torch.compile(
        model, backend="te", fullgraph=True, dynamic=False, options={"recipe": recipe, **INVARIANT, **options}
    )


def test_the_eager_product_sums_in_one_order():
    a, b = torch.randn(2, 9, 300).bfloat16(), torch.randn(2, 7, 300).bfloat16()
    y = fixed_mm(a, b, None, None, False, torch.float32)
    error = (y.double() - a.double() @ b.double().mT).abs()
    assert (error <= 2 * 300 * 2.0**-24 * (a.double().abs() @ b.double().abs().mT)).all()
    for rows in range(1, 9):
        assert torch.equal(fixed_mm(a[:, :rows], b, None, None, False, torch.float32), y[:, :rows])
    assert torch.equal(fixed_mm(a, b.mT.contiguous(), None, None, False, torch.float32, True), y)
    longer = [torch.cat([one, torch.zeros(2, one.shape[1], 5).bfloat16()], 2) for one in (a, b)]
    assert torch.equal(fixed_mm(*longer, None, None, False, torch.float32), y)


@pytest.mark.codegen
@pytest.mark.usefixtures("vectors")  # so that it is the option that leaves them out
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("block", marks=pytest.mark.thorough)])
def test_rows_are_alike_in_any_number_trained_or_not(recipe):
    torch.manual_seed(0)
    model = Layers().bfloat16()
    run, x = compiled(model, recipe, policy={"head": "none"}, fallback="error"), torch.randn(21, 256).bfloat16()
    trained = run(x)
    trained.square().sum().backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in model.parameters())
    with torch.no_grad():
        for first, last in ((4, 5), (3, 16)):
            assert torch.equal(run(x[first:last].contiguous()), trained[first:last]), (first, last)


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8", "none"])
def test_decoding_has_the_log_probabilities_of_training(recipe):
    torch.manual_seed(0)
    model = Decoder(96, 128, 256, 4, 2, qwen=recipe == "rowwise").bfloat16()
    with torch._dynamo.config.patch(recompile_limit=64):
        run = compiled(model, recipe)
        ids = torch.randint(0, 96, (5, 24))
        trained = run(ids, torch.arange(24)).detach()
        for batch in (5, 1):
            assert torch.equal(generated(run, model, ids[:batch], 16, 32), trained[:batch])


def row_of(report, fqn: str):
    return next(site for site in report.sites if site.fqn == fqn and site.gemm == "fprop")


def shared(slot, module):
    if slot in ("input", "weight", "grad_output"):
        return Quantizer("e4m3", scope="128x128" if slot == "input" else "1x128")


@pytest.mark.parametrize(
    ("recipe", "kernel", "reason"),
    [
        ("rowwise", "fixed_order", None),
        ("block", "fixed_order", None),
        ("mxfp8", "fixed_order", None),
        ("current", "high_precision", "rows of its input share a scale (tensor), expected scales of rows or of blocks"),
        ("delayed", "high_precision", "rows of its input share a scale (tensor)"),
        ("nvfp4", "high_precision", "rows of its input share a scale (1x16, and a factor of the tensor)"),
        ("nvfp4_weight_only", "high_precision", "kernels of weights stored as they learn are chosen by"),
        (CustomRecipe(shared), "high_precision", "rows of its input share a scale (128x128"),
    ],
    ids=lambda one: one if isinstance(one, str | None) else type(one).__name__,
)
def test_which_recipes_keep_rows_apart(recipe, kernel, reason):
    report = explain(Layers(), torch.randn(8, 256), options={"recipe": recipe, "fallback": "silent", **INVARIANT})
    site = row_of(report, "inner")
    assert site.kernel == kernel and (site.reason is None if reason is None else reason in site.reason), site
    assert not report.unmet and not report.weights  # high precision is summed in one order too; nothing was weighed


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.convolution = nn.Linear(64, 192), nn.Conv1d(64, 64, 3)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, 16)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5) + F.scaled_dot_product_attention(q, k, v)
        y = y + (q @ k.mT) @ v
        return self.convolution(y.transpose(1, 2).flatten(2).mT)


def test_what_is_not_reached_is_named():
    options = {"recipe": "rowwise", "fallback": "silent", **INVARIANT}
    report = explain(Others(), torch.randn(2, 8, 64), options=options)
    reasons = [one.reason for one in report.unmet if one.option == "batch_invariant"]
    assert any("dropout of 0.5" in reason for reason in reasons)
    assert sum("no linear layer (matmul)" in reason for reason in reasons) >= 2
    assert any("no linear layer (convolution)" in reason for reason in reasons)
    assert [site.kernel for site in report.attention] == ["sdpa", "sums in one order"]
    with pytest.raises(BackendCompilerFailed, match=r"FallbackError: .*option 'batch_invariant' does not reach"):
        torch.compile(Others(), backend="te", options={**options, "fallback": "error"})(torch.randn(2, 8, 64))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)


def in_autocast(q, k, v):
    """Its numbers are those of bf16, a mask's smallest number of fp32 minus infinity among them."""
    mask = torch.where(torch.arange(k.shape[2]) < 5, 0.0, torch.finfo(torch.float32).min).expand(q.shape[2], -1)
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("run", "queries", "keys"),
    [(causal, 7, 9), (in_autocast, 7, 9), (causal, 7, 0), (causal, 0, 9)],
    ids=["grouped", "autocast", "no keys", "no queries"],
)
def test_attention_is_what_torch_has(run, queries, keys):
    torch.manual_seed(0)
    sizes = (2, 6, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    tensors = [torch.randn(one, requires_grad=True) for one in sizes]
    compute = torch.compile(run, backend="te", options={"recipe": "none", "fallback": "error", **INVARIANT})
    y, expected = compute(*tensors), run(*tensors)
    rounding = 2.0**-6 if y.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y, expected, rtol=rounding, atol=rounding)
    found, gradients = (torch.autograd.grad(one.float().square().sum(), tensors) for one in (y, expected))
    torch.testing.assert_close(found, gradients, rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.usefixtures("without_codegen")
def test_attention_saves_no_weights_of_keys():
    q, k, v = (torch.randn(2, heads, 40, 16, requires_grad=True) for heads in (6, 2, 2))
    compute, saved = torch.compile(causal, backend="te", options={"recipe": "none", **INVARIANT}), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        y = compute(q, k, v)
    y.sum().backward()
    assert saved and all(40 * 40 not in (shape[-1] * shape[-2], shape[-1]) for shape in saved if len(shape) > 1)


@pytest.mark.usefixtures("without_tracing")
def test_high_precision_is_rewritten_too():
    """The eager product adds up column by column, which a library does not."""
    torch.manual_seed(0)
    layer, x = nn.Linear(300, 24), torch.randn(5, 300)
    y = torch.compile(layer, backend="te", options={"recipe": "none", **INVARIANT})(x)
    expected = fixed_mm(x[None], layer.weight[None], None, None, False, torch.float32)[0] + layer.bias
    assert torch.equal(y, expected) and not torch.equal(y, layer(x))
    y.sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(24, 300))


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.parametrize("recipe", ["none", "rowwise"])
@pytest.mark.parametrize(
    "run",
    [
        lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=0.5),
        lambda b, x, w: torch.addmm(b * torch.nan, x, w, beta=0),
        lambda b, x, w: torch.func.grad(lambda x: torch.addmm(b, x, w).square().sum())(x),
        lambda b, x, w: torch.func.jvp(lambda x: torch.addmm(b, x, w), (x,), (x,))[1],
        lambda b, x, w: torch.func.vmap(lambda x: x @ w)(x[:, None]),
        lambda b, x, w: F.linear(x[:, :0], w[:, :0], x[0, :64]),
    ],
    ids=["scaled", "without bias", "grad", "jvp", "vmap", "of no columns"],
)
def test_what_is_no_plain_layer_stays_as_written(run, recipe):
    layer, x = nn.Linear(64, 64), torch.randint(-2, 3, (5, 64)).float().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-2, 3, (64, 64)))

    def function(x):
        return run(layer.bias, x, layer.weight)

    options = {"recipe": recipe, "fallback": "warn", **INVARIANT}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "te_inductor: compiled without")
        warnings.filterwarnings("ignore", "te_inductor")
        found = torch.compile(function, backend="te", options=options)(x)
    torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize("biased", [False, True])
def test_operands_of_two_dtypes_are_torchs_to_refuse(biased):
    """Eager code refuses them; autocast casts them."""
    x, layer = torch.randn(4, 32), nn.Linear(32, 32, dtype=torch.float32 if biased else torch.bfloat16)
    bias = torch.randn(32, dtype=torch.bfloat16)
    run = compiled(lambda x: F.linear(x, layer.weight, bias), "none", fallback="silent")
    with pytest.raises(RuntimeError, match="dtype"):
        run(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.bfloat16


def test_the_size_rule_is_not_asked(monkeypatch):
    asked = []
    monkeypatch.setattr("te_inductor.passes.pre_grad.decide.size_rule.weigh", asked.append)
    for exact in (False, True):
        explain(Layers(), torch.randn(8, 256), options={"recipe": "rowwise", "batch_invariant": exact})
    assert len(asked) == 1


@pytest.mark.usefixtures("without_tracing")
def test_a_policys_function_does_not_see_the_number_of_rows():
    seen = []

    def entry(fqn, sizes):
        seen.append(sizes)
        return True

    with torch.no_grad():
        torch.compile(Layers(), backend="te", options={"policy": {entry: "rowwise"}, **INVARIANT})(torch.randn(8, 256))
    assert {sizes[0] for sizes in seen} == {None} and (None, 128, 256) in seen


def test_errors(monkeypatch):
    for given, text in (
        ({"batch_invariant": "yes"}, r"option 'batch_invariant' is a str .*expected True or False"),
        (
            {**INVARIANT, "mode": "max-autotune"},
            r"mode 'max-autotune' has max_autotune.* beside option 'batch_invariant'",
        ),
        ({**INVARIANT, "cpp.simdlen": 512}, r"Inductor's option 'cpp.simdlen' has .* = 512 beside"),
    ):
        with pytest.raises(OptionError, match=text):
            parse(None, given)
    monkeypatch.setenv("TE_INDUCTOR_BATCH_INVARIANT", "perhaps")
    with pytest.raises(OptionError, match=r"TE_INDUCTOR_BATCH_INVARIANT is a str .*expected true or false"):
        parse(None, {})
    monkeypatch.setenv("TE_INDUCTOR_BATCH_INVARIANT", "true")
    assert parse(None, {}).batch_invariant
