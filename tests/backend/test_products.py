"""Every matrix product with a weight is in the report, whether a rule takes it or not; all count in the share of
FLOPs."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_inductor import explain
from te_inductor.errors import FallbackError, FallbackWarning

K, N = 48, 32
BUFFER, COMPUTED = "the weight is a buffer", "the weight is computed in the graph"
aten = torch.ops.aten


class Form(nn.Module):
    """`p` is a parameter, `c` a buffer of the same shape, `g` a parameter that scales it."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.p = nn.Parameter(torch.randn(shape))
        self.inner.g = nn.Parameter(torch.randn(shape))
        self.inner.register_buffer("c", torch.randn(shape))
        self.inner.forward = lambda x: function(x, self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def offsets(x: Tensor) -> Tensor:
    return torch.full((2,), x.shape[0], dtype=torch.int32).cumsum(0, dtype=torch.int32) // 2


BF16 = torch.bfloat16

# How a product is written; the shape of the parameter and of x; the pattern, (M, N, K) and FLOPs; why it stays in high
# precision, None where it does not.
FORMS = {
    "F.linear": (lambda x, m: F.linear(x, m.p), (N, K), (6, K), "linear", (6, N, K), None),
    "x @ p": (lambda x, m: x @ m.p, (K, N), (2, 3, K), "matmul", (6, N, K), None),
    "p @ x": (lambda x, m: m.p @ x, (N, K), (K, 16), "linear", (16, N, K), None),
    "addmm": (lambda x, m: torch.addmm(m.g[0], x, m.p), (K, N), (6, K), "linear", (6, N, K), None),
    "bmm": (lambda x, m: torch.bmm(x, m.p), (2, K, N), (2, 3, K), "matmul", (6, N, K), None),
    "einsum": (lambda x, m: torch.einsum("bsd,df->bsf", x, m.p), (K, N), (2, 3, K), "matmul", (6, N, K), None),
    "tensordot": (lambda x, m: torch.tensordot(x, m.p, 1), (K, N), (2, 3, K), "matmul", (6, N, K), None),
    "inner": (lambda x, m: torch.inner(x, m.p), (N, K), (6, K), "linear", (6, N, K), None),
    "beside inner of numbers": (
        lambda x, m: F.linear(x, m.p) * torch.inner(x.sum(), x.mean()),
        *((N, K), (6, K), "linear", (6, N, K), None),
    ),
    "x @ (p * g)": (lambda x, m: x @ (m.p * m.g), (K, N), (6, K), "matmul", (6, N, K), COMPUTED),
    "a standardized weight": (
        lambda x, m: x @ ((m.p - m.p.mean()) / m.p.std()),
        *((K, N), (6, K), "matmul", (6, N, K), COMPUTED),
    ),
    "a modulated weight": (
        lambda x, m: x @ (m.p * x.mean(0)[:, None]),
        *((K, N), (6, K), "matmul", (6, N, K), COMPUTED),
    ),
    "x @ (p @ g)": (lambda x, m: x @ (m.p.mT @ m.g), (K, N), (6, N), "matmul", (6, N, N), COMPUTED),
    "x @ buffer": (lambda x, m: x @ m.c, (K, N), (6, K), "matmul", (6, N, K), BUFFER),
    "buffer.T @ x": (lambda x, m: m.c.mT @ x, (K, N), (K, 6), "matmul", (N, 6, K), BUFFER),
    "aten.mm": (lambda x, m: aten.mm.default(x, m.p), (K, N), (6, K), "matmul", (6, N, K), None),
    "aten.addmm": (
        lambda x, m: aten.addmm(m.g[0], x, m.p),
        *((K, N), (6, K), "matmul", (6, N, K), "no rule reads aten.addmm"),
    ),
    "baddbmm": (
        lambda x, m: torch.baddbmm(m.g[:, :1], x, m.p),
        *((2, K, N), (2, 3, K), "matmul", (6, N, K), "no rule reads baddbmm"),
    ),
    "mv": (lambda x, m: x.mv(m.p), (K,), (6, K), "matmul", (6, 1, K), "no rule reads mv"),
    "bilinear": (
        lambda x, m: F.bilinear(x, x, m.p),
        *((N, 4, 4), (6, 4), "matmul", (6, N, 16), "no rule reads bilinear"),
    ),
    "multi_dot": (
        lambda x, m: torch.linalg.multi_dot([x, m.p, m.p.mT]),
        *((K, N), (6, K), "matmul", (6, K, K), "no rule reads"),
    ),
    "a matmul over a batch": (
        lambda x, m: x[None] @ m.p[:, None],
        *((2, K, N), (3, 5, K), "matmul", (30, N, K), "a product of shapes (1, 3, 5, 48) and (2, 1, 48, 32)"),
    ),
    "experts, einsum": (
        lambda x, m: torch.einsum("ecm,emh->ech", x, m.p),
        *((2, K, N), (2, 3, K), "matmul", (6, N, K), "einsum 'ecm,emh->ech' is not one linear layer"),
    ),
    "einsum, lists": (
        lambda x, m: torch.einsum(x, [..., 1], m.p, [1, 2], [..., 2]),
        *((K, N), (2, 3, K), "matmul", (6, N, K), "einsum is not one linear layer"),
    ),
    "experts, picked": (
        lambda x, m: torch.bmm(m.p[x.argmax(-1) % 2], x[:, :, None]),
        *((2, N, K), (5, K), "matmul", (5 * N, 1, K), "a product of shapes (5, 32, 48) and (5, 48, 1)"),
    ),
    "experts, grouped": (
        lambda x, m: torch._grouped_mm(x.to(BF16), m.p.to(BF16), offs=offsets(x)),
        *((2, K, N), (8, K), "grouped_linear", (8, N, K), None),
    ),
}
if hasattr(F, "grouped_mm"):
    FORMS["experts, F.grouped_mm"] = (
        lambda x, m: F.grouped_mm(x.to(BF16), m.p.to(BF16), offs=offsets(x)),
        *((2, K, N), (8, K), "grouped_linear", (8, N, K), None),
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_product_with_a_weight_is_reported(form):
    function, of_p, of_x, pattern, sizes, reason = FORMS[form]
    model = Form(function, *of_p)
    with torch.no_grad():
        report = explain(model, torch.randn(of_x))
    assert report.failure is None
    [site] = report.sites
    fqn = "inner.p" if pattern == "grouped_linear" and reason is None else "inner"  # a module has several
    assert (site.fqn, site.pattern, site.gemm, site.shapes) == (fqn, pattern, "fprop", sizes)
    assert site.recipe == "current" or reason is None
    assert (site.kernel == "high_precision") == (reason is not None)
    assert site.reason is None if reason is None else site.reason.startswith(reason)
    assert report.flops.total >= site.flops > 0 and report.flops.low == (site.flops if reason is None else 0)


ACTIVATIONS = {
    "of two activations": lambda x, m: x @ x.mT,
    "an outer product with a buffer": lambda x, m: m.c[:, :1] @ x[:1],
    "of two parameters": lambda x, m: x.sum() * (m.p @ m.g.mT),
    "scaled activations": lambda x, m: (x * m.p[0]) @ x.mT,
    "masked scores": lambda x, m: (x @ x.mT) * m.c[:6, :6] @ x,
    "with positions added": lambda x, m: (x + m.p[:6]) @ x.mT,
    "of embeddings": lambda x, m: (lambda e: e @ x.mT)(F.embedding(x.argmax(-1), m.p)),
    "of rotated activations": lambda x, m: (x * m.c[:6].cos()) @ x.mT,
    "of a cache": lambda x, m: x @ m.c.index_copy_(0, x.argmax(-1)[:1], x[:1]).mT,
    "of a cache, a slice": lambda x, m: (m.c[2:8].copy_(x), x @ m.c.mT)[1],
    "element by element": lambda x, m: x * m.p[:6],
}


@pytest.mark.parametrize("form", ACTIVATIONS)
def test_other_products_are_no_sites(form):
    model, x = Form(ACTIVATIONS[form], K, K), torch.randn(6, K)
    report = explain(model, x, options={"fallback": "error"})
    assert report.failure is None and not report.sites and report.flops.low == 0


def test_learned_queries_are_activations():
    """Made of parameters alone, by a linear layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.queries = nn.Linear(K, K), nn.Parameter(torch.randn(16, K))

        def forward(self, x):
            return self.q(self.queries) @ x.mT

    assert {site.fqn for site in explain(Model(), torch.randn(6, K)).sites} == {"q"}


def test_flops():
    """The FLOPs are the forward's, products of activations too; by hand."""
    model = nn.Sequential(nn.Linear(K, N), Form(lambda x, m: (x @ x.mT) @ x @ m.c, N, N))
    report = explain(model, torch.randn(6, K))
    low, scores, values, buffer = 2 * 6 * N * K, 2 * 6 * 6 * N, 2 * 6 * 6 * N, 2 * 6 * N * N
    assert (report.flops.low, report.flops.total) == (low, low + scores + values + buffer)
    assert [site.flops for site in report.sites] == [low, None, buffer]
    assert f"{report.flops.share:.1%} of the FLOPs of the forward's matrix products are in low precision" in str(report)


@torch._dynamo.disable
def eagerly(module, *inputs):
    return module(*inputs)


STEPS = torch.randn(5, 4, K)  # of 4 rows
IMAGES = torch.randn(2, K, 7)
# Products that no recipe is for: the layer, its input, the pattern, and the FLOPs of one call.
OUTSIDE = {
    "LSTMCell": (lambda: nn.LSTMCell(K, N), STEPS[0], "recurrent", 2 * 4 * 4 * N * (K + N)),
    "GRUCell": (lambda: nn.GRUCell(K, N), STEPS[0], "recurrent", 2 * 4 * 3 * N * (K + N)),
    "RNNCell": (lambda: nn.RNNCell(K, N), STEPS[0], "recurrent", 2 * 4 * N * (K + N)),
    "LSTM": (lambda: nn.LSTM(K, N, 2), STEPS, "recurrent", 2 * 20 * 4 * N * (K + N + N + N)),
    "GRU": (lambda: nn.GRU(K, N), STEPS, "recurrent", 2 * 20 * 3 * N * (K + N)),
    "RNN": (lambda: nn.RNN(K, N, bidirectional=True), STEPS, "recurrent", 2 * 2 * 20 * N * (K + N)),
    "conv1d": (lambda: nn.Conv1d(K, N, 3), IMAGES, "convolution", 2 * 2 * 5 * N * K * 3),
    "conv3d": (lambda: nn.Conv3d(K, N, 1, stride=2), IMAGES[..., None, None], "convolution", 2 * 2 * 4 * N * K),
    "transposed": (lambda: nn.ConvTranspose1d(K, N, 3), IMAGES, "convolution", 2 * 2 * 7 * N * K * 3),
}


@pytest.mark.parametrize("reached", [True, False], ids=["in a graph", "behind a break"])
@pytest.mark.parametrize("what", OUTSIDE)
def test_what_no_recipe_is_for_counts_and_is_no_fallback(what, reached):
    layer, x, pattern, flops = OUTSIDE[what]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.other, self.layer = nn.Linear(K, K), layer()

        def forward(self, x):
            return self.other(torch.ones(16, K)).sum() + self.first(
                self.layer(x) if reached else eagerly(self.layer, x)
            )

        def first(self, y):
            return y[0] if isinstance(y, tuple) else y

    report = explain(Model(), x, options={"fallback": "silent"})
    assert report.failure is None and all(site.fqn != "layer" for site in report.fallbacks)
    [other] = (site for site in report.sites if (site.fqn, site.gemm) == ("other", "fprop"))
    high = [site for site in report.sites if site.fqn == "layer"]
    assert {(site.pattern, site.recipe, site.outside) for site in high} == {(pattern, "none", True)}
    assert (sum(site.flops for site in high), report.flops.total) == (flops, other.flops + flops)


def test_recurrent_layers_that_dynamo_takes():
    model = nn.LSTM(K, N, 2)
    with torch._dynamo.config.patch(allow_rnn=True):
        [site] = explain(model, STEPS).sites
    assert (site.pattern, site.outside, site.flops) == ("recurrent", True, OUTSIDE["LSTM"][3])


def test_a_convolution_that_would_be_a_layer_is_missed():
    """One of a single element, which no graph reached."""
    layer = nn.Conv1d(K, N, 1)
    [site] = explain(lambda x: eagerly(layer, x), IMAGES, options={"fallback": "silent"}).sites
    assert not site.outside and site.reason.startswith("no compiled graph reached it")


def test_symbolic_sizes_count_as_traced():
    model, x = Form(lambda x, m: x @ m.c, K, N), torch.randn(6, K)
    with torch._dynamo.config.patch(assume_static_by_default=False):
        report = explain(model, x)
    assert isinstance(report.sites[0].shapes[0], str)
    assert report.flops.total == 2 * 6 * K * N


def test_sizes_that_only_a_run_can_tell_are_not_counted():
    model, x = Form(lambda x, m: x[x[:, 0].nonzero().flatten()] @ m.c, K, N), torch.randn(6, K)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explain(model, x)
    assert report.flops.unknown == 1 and report.flops.total == 0
    assert [site.flops for site in report.sites] == [None]


def test_inside_a_checkpoint():
    """A buffer is an operand of the body."""
    form = Form(lambda x, m: x @ m.c + x @ (m.p * 2), K, N)
    report = explain(lambda x: torch.utils.checkpoint.checkpoint(form, x, use_reentrant=False), torch.randn(6, K))
    assert [site.reason.partition(",")[0] for site in report.sites] == [f"{BUFFER}", COMPUTED]


@pytest.mark.usefixtures("without_tracing")
def test_warning_error_and_policy():
    model = nn.Sequential(nn.Linear(K, K), Form(lambda x, m: x @ (m.p * m.g), K, N))
    x = torch.randn(6, K)

    def run(**options):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(model, backend="te", options=options)(x)
        return [str(one.message) for one in caught if one.category is FallbackWarning]

    [text] = run()
    assert "1 of 2 linear sites stay in high precision:" in text and f"{COMPUTED}, and is no" in text
    assert ": 1.inner (40.0% of FLOPs)" in text
    assert "60.0% of the FLOPs of the forward's matrix products are in low precision" in text
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=COMPUTED) as raised:
        run(fallback="error")
    assert type(raised.value.inner_exception) is FallbackError
    assert run(fallback="silent") == []
    # "none" is what is asked for there, and the entry is used.
    assert run(policy={"1.inner": "none"}, fallback="error") == []
    assert run(recipe="none") == []


@pytest.mark.quick("batched_mm")
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_mixtral(experts):
    """Its experts hold most of the FLOPs, which the count of GEMMs does not show."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = transformers.MixtralForCausalLM(config)
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip("this transformers has loops over experts")
    model.set_experts_implementation(experts)
    with torch.no_grad():
        report = explain(model, torch.randint(64, (1, 16)))
    products = [site for site in report.sites if site.fqn.startswith("model.layers.0.mlp.experts")]
    low = experts == "grouped_mm"
    assert len(products) == 2 and all((site.reason is None) == low for site in products)
    tokens = 2 * 16  # two experts a token
    assert sum(site.flops for site in products) == 2 * tokens * (64 * 256 + 128 * 64)
    layers = 2 * 16 * 64 * (64 + 32 + 32 + 64 + 64)
    if low:
        assert {site.pattern for site in products} == {"grouped_linear"}
        assert report.flops.low == layers + sum(site.flops for site in products)
        return
    assert report.flops.low == layers and 0.2 < report.flops.share < 0.3
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"model\.layers\.0\.mlp\.experts"):
        torch.compile(model, backend="te", options={"fallback": "error", "policy": {"*.gate": "none"}})(
            torch.randint(64, (1, 16))
        )
