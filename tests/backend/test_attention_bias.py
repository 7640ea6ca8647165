"""A bias that is added to attention's scores: ALiBi, T5's relative bias, by hand and as the float mask of torch's
attention, also a learned one."""

import pytest
import torch

from te_inductor.passes.pre_grad.attention import sites
from tests.attention import Passes, as_on_a_gpu, operands
from tests.attention_bias import BIASES, MASKS, alibi, program, relative

HOW = ("added", "filled", "infinite", "before the scale", "sdpa", "sdpa, filled", "sdpa, infinite")
# All ways of one bias, and all biases in two ways; each with all masks.
CASES = [(alibi, how) for how in HOW] + [(bias, how) for bias in BIASES[1:] for how in ("added", "sdpa")]
CASES += [(relative, how) for how in ("filled", "sdpa, filled")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_a_bias(case, mask, monkeypatch):
    (bias, how), backend = case, Passes()
    run = program(bias, mask, how)
    tensors, padding, documents = operands(37, groups=4)
    table = torch.randn(11, 4, requires_grad=True)
    tensors = [*tensors, table] if bias is relative else tensors
    given = [] if bias is relative else [table]
    if "padded" in mask and "infinite" in how:
        padding[:, 0] = 1  # as torch's plain attention has no number for queries without a key, in some releases

    def gradients(run, tensors):
        y = run(*tensors[:3], padding, documents, *tensors[3:], *given)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        return [y, *torch.autograd.grad(y, tensors, dy)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = gradients(run, [one.detach().double().requires_grad_() for one in tensors])
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        found = gradients(torch.compile(run, backend=backend), tensors)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 2e-5 * other.norm() + 1e-6
    [site] = backend.found
    kinds = [] if mask == "none" else mask.split(", ")
    assert site.mask == ", ".join([*kinds, "bias"])
    assert site.kernel == "flex_attention"


def test_a_bias_is_left_until_it_is_measured(monkeypatch):
    backend = Passes()
    tensors, padding, documents = operands(37, groups=4)
    with as_on_a_gpu(monkeypatch):
        monkeypatch.setattr(sites, "BIAS_QUERIES", None)
        torch.compile(program(alibi, "causal", "sdpa"), backend=backend)(*tensors, padding, documents, None)
    [site] = backend.found
    assert site.kernel == "sdpa, the mask as a tensor" and "with a bias is slower" in site.reason


T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
MODELS = {
    "Mpt": ({"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 64}, "causal, padded, bias"),
    "Falcon": ({"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "alibi": True}, "causal, padded, bias"),
    "T5Encoder": (T5, "padded, bias"),
    "UMT5Encoder": (T5, "padded, bias"),
    "Bloom": ({"hidden_size": 32, "n_head": 2, "n_layer": 1}, "causal, padded, bias"),
}  # fmt: skip


@pytest.mark.quick("T5Encoder", "Falcon")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, monkeypatch):
    """Outputs and all gradients, the table's of T5 among them, with a padding on both sides."""
    import transformers

    sizes, mask = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Model")
    model = kind(kind.config_class(vocab_size=50, **sizes))
    tokens, keep = torch.randint(50, (2, 23)), torch.ones(2, 23, dtype=torch.int64)
    keep[0, :4], keep[1, 20:] = 0, 0
    backend, results = Passes(), []
    with as_on_a_gpu(monkeypatch):
        for run in (model, torch.compile(model, backend=backend)):
            model.zero_grad()
            y = run(tokens, attention_mask=keep).last_hidden_state
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
            results.append([y, *(one.grad for one in model.parameters() if one.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-7
    assert {(site.mask, site.kernel) for site in backend.found} == {(mask, "flex_attention")}
