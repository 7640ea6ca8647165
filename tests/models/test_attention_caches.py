"""transformers' caches with attention as on a GPU: `generate()`, and prompts that come in pieces."""

import types

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from tests.attention import Passes, as_on_a_gpu

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LENGTHS = (21, 13)


def made():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=64, num_hidden_layers=1, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def padded(length):
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


def generated(model, cache):
    settings = {"do_sample": False, "disable_compile": True, "output_logits": True, "return_dict_in_generate": True}
    for length in LENGTHS:
        ids, mask = padded(length)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=3, cache_implementation=cache, **settings)
        yield torch.stack(out.logits)


def in_pieces(model, run, kind):
    for length in LENGTHS:
        ids, mask = padded(length)
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=40)
            cache.early_initialization(2, 1, 16, torch.float32, "cpu")
        pieces = ((0, 8), (8, length))
        with torch.no_grad():
            yield [run(ids[:, i:j], attention_mask=mask[:, :j], past_key_values=cache).logits for i, j in pieces]


@pytest.mark.thorough
@pytest.mark.parametrize("cache", (None, "static"))
def test_generate(cache, monkeypatch):
    """The same logits, by as many programs as without the passes."""
    model, forward, counts = made(), LlamaForCausalLM.forward, []
    expected = list(generated(model, cache))
    with as_on_a_gpu(monkeypatch):
        for backend in (CompileCounter(), Passes()):
            torch._dynamo.reset()
            model.forward = types.MethodType(torch.compile(forward, backend=backend), model)
            torch.testing.assert_close(list(generated(model, cache)), expected)
            counts.append(getattr(backend, "frame_count", None) or backend.graphs)
    assert counts[0] == counts[1]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ("dynamic", "static"))
def test_a_prompt_in_pieces(kind, monkeypatch):
    model, backends = made(), (CompileCounter(), Passes())
    expected = list(in_pieces(model, model, kind))
    with as_on_a_gpu(monkeypatch):
        for backend in backends:
            torch._dynamo.reset()
            torch.testing.assert_close(list(in_pieces(model, torch.compile(model, backend=backend), kind)), expected)
    assert backends[0].frame_count == backends[1].graphs
    assert {site.kernel for site in backends[1].found} == {"flex_attention"}
