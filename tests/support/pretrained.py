"""A tiny Llama that is saved and loaded by transformers."""

import pytest
import torch

from te_inductor.ops.stored_weight import StoredWeight

transformers = pytest.importorskip("transformers")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


IDS = torch.arange(7).unsqueeze(0)


def llama(**given):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 2, "vocab_size": 128} | given)
    return transformers.LlamaForCausalLM(config).eval()


def load(folder, **given):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
    assert not any(info.values()), info
    return model


def assert_same(one, two):
    assert one.state_dict().keys() == two.state_dict().keys()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert type(a.data) is type(b.data)
        pairs = zip(a.parts, b.parts, strict=True) if isinstance(a, StoredWeight) else [(a, b)]
        assert all(torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)) for x, y in pairs)
    with torch.no_grad():
        assert torch.equal(one(IDS.to(one.device)).logits, two(IDS.to(two.device)).logits)
