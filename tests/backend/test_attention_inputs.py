"""Masks that a graph takes: buffers of models, and inputs of blocks that are compiled one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor.passes.pre_grad.attention import inputs, sites
from te_inductor.runtime.attention import bands
from te_inductor.runtime.attention.bands import Band, band_of
from tests.attention import Passes, as_on_a_gpu, operands

INF = float("inf")
MIN = torch.finfo(torch.float32).min
LENGTH = 40


def triangle(length, keys=None):
    return torch.ones(length, keys or length, dtype=torch.bool).tril()


def padding(length, left, right):
    """(2, 1, L, L): the first sequence is padded in front, the second behind."""
    keep = torch.ones(2, 1, 1, length, dtype=torch.bool)
    keep[0, ..., :left], keep[1, ..., length - right :] = False, False
    return keep


def with_one_more(mask, row, column):
    mask = mask.clone()
    mask[..., row, column] = ~mask[..., row, column] if mask.dtype is torch.bool else 0.5
    return mask


WINDOW = triangle(30) ^ torch.ones(30, 30, dtype=torch.bool).tril(-8)
BANDS = {
    "causal": (triangle(30), Band(True, False, 0, None)),
    "of what is hidden": (~triangle(30), Band(False, True, 0, None)),
    "numbers": (triangle(30).float().view(1, 1, 30, 30), Band(1.0, 0.0, 0, None)),
    "infinite": (torch.full((30, 30), -INF).triu(1), Band(0.0, -INF, 0, None)),
    "smallest": (torch.full((2, 1, 30, 30), MIN).triu(1), Band(0.0, MIN, 0, None)),
    "offset": (torch.ones(10, 30, dtype=torch.bool).tril(20), Band(True, False, 20, None)),
    "strict": (torch.ones(30, 30, dtype=torch.bool).tril(-1), Band(False, True, None, 0)),
    "window": (WINDOW, Band(True, False, 0, -7)),
    "window alone": (torch.ones(30, 30, dtype=torch.bool).triu(-7), Band(True, False, None, -7)),
    "full": (torch.ones(2, 30, 20, dtype=torch.bool), Band(True, True, None, None)),
    "one query": (torch.ones(1, 30, dtype=torch.bool), Band(True, True, None, None)),
    "expanded": (triangle(30).expand(3, 2, 30, 30), Band(True, False, 0, None)),
    "padded": (triangle(30) & padding(30, 4, 5), Band(True, False, 0, None, padded=True)),
    "padded numbers": (
        torch.zeros(2, 1, 30, 30).masked_fill(~(triangle(30) & padding(30, 0, 5)), -INF),
        Band(0.0, -INF, 0, None, padded=True),
    ),
    "padded both ways": (padding(30, 4, 5).expand(2, 1, 30, 30), Band(True, False, None, None, padded=True)),
    "one element off": (with_one_more(triangle(30), 17, 20), None),
    "one of a batch": (with_one_more(triangle(30).repeat(2, 1, 1, 1), 17, 3)[:, :, :, :], None),
    "window, padded": (WINDOW & padding(30, 4, 5), None),
    "three numbers": (with_one_more(torch.full((30, 30), -INF).triu(1), 29, 3), None),
    "not a number": (torch.full((30, 30), torch.nan).triu(1), None),
    "scores": (torch.randn(30, 30), None),
    "rows alike": (padding(30, 0, 5)[1:].expand(1, 1, 30, 30).float() + triangle(30), None),
}


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("chunk", (1, 1 << 20))
def test_bands(name, chunk, monkeypatch):
    monkeypatch.setattr(bands, "_CHUNK", chunk)
    tensor, expected = BANDS[name]
    assert band_of(tensor.clone(memory_format=torch.preserve_format)) == expected
    assert band_of(tensor) == expected


def test_a_tensor_is_compared_once_a_version(monkeypatch):
    counted, compared = [], bands._compared
    monkeypatch.setattr(bands, "_compared", lambda tensor: counted.append(1) or compared(tensor))
    mask = triangle(20)
    assert band_of(mask) == band_of(mask) == Band(True, False, 0, None) and len(counted) == 1
    mask[3, 9] = True
    assert band_of(mask) is None and band_of(mask) is None and len(counted) == 2
    mask.data = triangle(20)
    assert band_of(mask) is not None and len(counted) == 3
    held = len(bands._known)
    del mask
    assert len(bands._known) == held - 1
    with torch.inference_mode():
        assert band_of(triangle(20)) is None and len(counted) == 3


class Nano(nn.Module):
    """Causal attention as nanoGPT has it, of which one branch calls torch's and the other writes it out."""

    def __init__(self, flash, window=None, dropout=0.0, heads=2, width=16):
        super().__init__()
        self.flash, self.heads, self.dropout = flash, heads, nn.Dropout(dropout)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        keep = torch.ones(64, 64).tril()
        self.register_buffer("bias", (keep if window is None else keep - keep.tril(-window)).view(1, 1, 64, 64))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.qkv(x).split(c, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :, :t, :t] == 1)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return y.transpose(1, 2).reshape(b, t, c)


def assert_same(module, compiled, *given, **more):
    """Outputs and gradients, against float64."""
    results = []
    for run, cast in ((module, torch.double), (compiled, torch.float)):
        module.to(cast)
        module.zero_grad()
        y = run(*(one.to(cast) if one.is_floating_point() else one for one in given), **more)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(cast))
        results.append([y, *(one.grad for one in module.parameters() if one.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-5 * one.double().norm() + 1e-6


@pytest.fixture
def on_a_gpu(monkeypatch):
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        yield


@pytest.mark.quick("7-True", "None-False")
@pytest.mark.parametrize("flash", (False, True))
@pytest.mark.parametrize("window", (None, 7))
def test_buffers_of_a_model(flash, window, on_a_gpu):
    """A buffer is read while it holds what it held; writes to it, and other buffers, are noticed."""
    module, backend = Nano(flash, window), Passes()
    compiled = torch.compile(module, backend=backend, dynamic=False)
    x = torch.randn(2, LENGTH, 32)
    expected = "causal" if window is None else "causal, window"
    for change, kind, graphs in (
        (lambda: None, expected, 1),
        (lambda: module.bias.mul_(1), expected, 1),  # another version of the same
        (lambda: module.bias[..., 9, 8].fill_(0), "dense", 2),
        (lambda: module.bias.copy_(torch.ones(64, 64).tril(3)), "causal with an offset", 3),
        (lambda: setattr(module, "bias", Nano(flash, window).bias.clone()), expected, 3),
    ):
        change()
        assert_same(module, compiled, x)
        assert backend.graphs == graphs and kind in backend.kinds()
    assert all(site.reason is None or "holds no triangle" in site.reason for site in backend.found)


def test_dropout_of_written_attention(on_a_gpu):
    module, backend = Nano(False, dropout=0.5), Passes()
    torch.compile(module, backend=backend)(torch.randn(1, 16, 32))
    assert [site.kernel for site in backend.found] == ["sdpa, is_causal"]


class Block(nn.Module):
    def forward(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_blocks_that_are_compiled_one_by_one(on_a_gpu, monkeypatch):
    """The mask of a step is compared once for all layers; another one of the same kind compiles nothing."""
    counted, compared, backend = [], bands._compared, Passes()
    monkeypatch.setattr(bands, "_compared", lambda tensor: counted.append(1) or compared(tensor))
    monkeypatch.setattr(inputs, "INPUT_QUERIES", 16)
    monkeypatch.setattr(sites, "BIAS_QUERIES", None)
    layers = [Block() for _ in range(3)]
    for layer in layers:
        layer.compile(backend=backend, dynamic=False)
    hidden = padding(LENGTH, 5, 9)
    float_mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~(triangle(LENGTH) & hidden), -INF)
    random = torch.randn(2, 1, LENGTH, LENGTH)
    q, k, v = (one.detach() for one in operands(LENGTH, groups=4)[0])
    steps = (
        (triangle(LENGTH), 1, "causal"),
        (triangle(LENGTH), 1, "causal"),
        (triangle(LENGTH) & hidden, 2, "causal, padded"),
        (triangle(LENGTH) & padding(LENGTH, 0, 3), 2, "causal, padded"),
        (triangle(LENGTH).expand(2, 1, -1, -1) & torch.ones(2, 1, 1, 1, dtype=torch.bool), 3, "causal"),
        (float_mask, 4, "causal, padded"),
        (random, 5, "bias"),
        (float_mask.clone(), 5, "causal, padded"),
        (torch.randn(2, 1, LENGTH, LENGTH), 5, "bias"),
    )
    for step, (mask, graphs, kind) in enumerate(steps, 1):
        expected = found = q
        for layer in layers:
            expected = expected + Block()(expected, k, v, mask)
            found = found + layer(found, k, v, mask)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert len(counted) == step and backend.graphs == graphs and kind in backend.kinds()
    kernels = [site.kernel for site in backend.found]
    assert kernels == [
        "sdpa, is_causal",
        "flex_attention",
        "sdpa, is_causal",
        "flex_attention",
        "sdpa, the mask as a tensor",
    ]
    assert "compile the model as a whole" in backend.found[-1].reason


def test_a_buffer_that_the_graph_writes(on_a_gpu):
    class Written(Nano):
        def forward(self, x):
            y = super().forward(x)
            self.bias.mul_(1)
            return y

    module, backend = Written(True), Passes()
    assert_same(module, torch.compile(module, backend=backend), torch.randn(2, LENGTH, 32))
    assert backend.kinds() == ["dense"] and "which the graph writes" in backend.found[0].reason


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


def test_a_bias_that_is_learned(on_a_gpu, monkeypatch):
    backend = Passes()
    monkeypatch.setattr(sites, "BIAS_QUERIES", None)
    q, k, v = operands(LENGTH, groups=4)[0]
    torch.compile(Learned(), backend=backend)(q, k, v)
    assert "which is learned" in backend.found[0].reason


SIZES = {"vocab_size": 50, "attn_implementation": "eager"}
MODELS = {
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0}, ["causal", "causal"]),
    "GPTNeo": (
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
            "max_position_embeddings": 64,
            "attention_dropout": 0.0,
        },
        ["causal", "causal, window"],
    ),
}


@pytest.mark.quick("GPTNeo")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, on_a_gpu):
    """Attention as these models write it, without padding and with it on both sides. Of two masks that are added, as those
    of GPT-Neo, a query of the padding in front attends to the keys that only one of them hides."""
    import transformers

    sizes, kinds = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **SIZES)).eval()
    backend = Passes()
    tokens, mask = torch.randint(50, (2, 23)), torch.ones(2, 23, dtype=torch.int64)
    mask[0, :4], mask[1, 20:] = 0, 0
    compiled = torch.compile(model, backend=backend)
    for given in ({}, {"attention_mask": mask}):
        expected, found = (run(tokens, use_cache=False, **given).last_hidden_state for run in (model, compiled))
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert backend.kinds() == [*kinds, *(f"{kind}, padded" for kind in kinds)]
    assert all(site.reason is None for site in backend.found)
