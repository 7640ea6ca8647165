"""transformers' `from_pretrained` and `save_pretrained` of stored weights onto a GPU, and `generate()` behind it."""

import pytest
import torch

import te_inductor

transformers = pytest.importorskip("transformers")
pretrained = pytest.importorskip("te_inductor.integrations.pretrained")

from tests.support.pretrained import assert_same, llama, load  # noqa: E402

GPU = {"dtype": torch.bfloat16, "device_map": "cuda"}


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4_weight_only", "current", "block"])
def test_what_was_saved_generates_the_same_tokens(recipe, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "plain")
    stored = load(tmp_path / "plain", quantization_config=pretrained.StoredWeightsConfig(recipe), **GPU)
    assert_same(stored, te_inductor.quantize_(load(tmp_path / "plain", **GPU), recipe))
    stored.save_pretrained(tmp_path / "stored")
    again = load(tmp_path / "stored", **GPU)
    assert_same(again, stored)
    config = transformers.CompileConfig(backend="te", mode="reduce-overhead", fullgraph=False, dynamic=False)
    prompt = torch.arange(1, 8, device="cuda").unsqueeze(0)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    one, other = (
        model.generate(prompt, attention_mask=torch.ones_like(prompt), compile_config=config, **given)
        for model in (stored, again)
    )
    assert one.shape == (1, 11) and torch.equal(one, other)
