"""`stream_quantized`: what an engine that runs is sent behind each step is what `quantize_` would have stored."""

import copy

import pytest
import torch
from torch import nn

from te_inductor import quantization_config, quantize_, quantized_state_dict, stream_quantized
from te_inductor.api.written_checkpoints import written
from te_inductor.errors import OptionError, StoredWeightError
from tests.checkpoints import ExpertsModel
from tests.ranks import told_by
from tests.support.streamed import Decoder, bits

pytestmark = pytest.mark.filterwarnings("ignore:te_inductor. lm_head keeps its weight")
told = told_by("tests.backend.streaming_ranks", 2, "streams")


def stored(model: nn.Module, recipe: str, policy=None):
    """A fresh copy that `quantize_` has stored, as a file would have it, tied weights once."""
    model = quantize_(copy.deepcopy(model), recipe, policy)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    tensors = quantized_state_dict(model)
    kept = {name: one for name, one in tensors.items() if name in names or name not in model.state_dict()}
    return bits((name, one.detach()) for name, one in kept.items()), written(model)[1]


@pytest.mark.parametrize("recipe", ["rowwise", "current", "block", "nvfp4_weight_only"])
def test_bits_are_those_of_quantize_after_each_step(recipe):
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        expected, configuration = stored(model, recipe)
        found = bits(stream_quantized(model, recipe))
        assert found == expected and quantization_config(model, recipe) == configuration
        assert "embed.weight" in found and "lm_head.weight" not in found and "blocks.0.bias_of_experts" in found
        assert any(name.startswith("blocks.1.gate_up_proj.weight_") for name in found)  # not taken apart
        seen.append(found)
        model(torch.arange(8)).sum().backward()
        optimizer.step()
    assert all(type(one) is nn.Parameter and one.requires_grad for one in model.parameters())
    changed = [name for name in seen[0] if seen[0][name] != seen[1][name]]
    assert any("q_proj" in name for name in changed)


def test_a_policy_and_a_format():
    model, policy = Decoder(), {"blocks.0.*": "none", "*.o_proj": "rowwise"}
    expected, configuration = stored(model, "block", policy)
    assert bits(stream_quantized(model, "block", policy)) == expected
    assert configuration["quant_method"] == "compressed-tensors"
    names = {name for name, _ in stream_quantized(model, "block", format="compressed-tensors")}
    assert "blocks.0.attention.o_proj.weight_scale" in names
    assert "blocks.0.attention.o_proj.weight_scale_inv" in {name for name, _ in stream_quantized(model, "block")}
    with pytest.raises(OptionError, match="format 'awq', expected 'fp8' or 'compressed-tensors'"):
        stream_quantized(model, "block", format="awq")
    with pytest.raises(StoredWeightError, match=r"of fp8, .*expected block"):
        stream_quantized(model, "rowwise", format="fp8")


def test_experts_come_one_by_one():
    model = ExpertsModel()
    expected, _ = stored(model, "rowwise")
    found = bits(stream_quantized(model, "rowwise"))
    assert found == expected and "experts.2.down_proj.weight_scale" in found


def test_names_are_those_of_the_model():
    model = Decoder()
    expected = bits(stream_quantized(model, "rowwise"))
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    wrapped = torch.compile(model, backend="eager")
    assert bits(stream_quantized(wrapped, "rowwise")) == expected
    assert quantization_config(wrapped, "rowwise") == quantization_config(Decoder(), "rowwise")


def test_adapters_have_to_be_merged():
    peft = pytest.importorskip("peft")
    model = Decoder()
    names = set(bits(stream_quantized(model, "rowwise")))
    plain = bits(stream_quantized(model, "rowwise"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    with pytest.raises(OptionError, match=r"blocks\.0\.attention\.o_proj has an adapter that is not merged"):
        stream_quantized(adapted, "rowwise")
    adapted.merge_adapter()
    merged = bits(stream_quantized(adapted, "rowwise"))
    assert set(merged) == names
    assert {name for name in names if merged[name] != plain[name]} == {
        f"blocks.{block}.attention.o_proj.weight{suffix}" for block in (0, 1) for suffix in ("", "_scale")
    }


def test_grad_mode_is_the_readers_between_tensors():
    for _ in stream_quantized(Decoder(), "nvfp4_weight_only"):
        assert torch.is_grad_enabled()


def test_what_is_refused():
    with pytest.raises(OptionError, match=r"expected an nn\.Module"):
        stream_quantized({}, "rowwise")
    with pytest.raises(OptionError, match="leaves no layer of the Decoder"):
        stream_quantized(Decoder(), "rowwise", {"*": "none"})
    model = Decoder()
    with torch.no_grad():
        model.blocks[1].attention.q_proj.weight[3, 5] = torch.inf
    with pytest.raises(StoredWeightError, match=r"blocks\.1\.attention\.q_proj\.weight has values that are not finite"):
        list(stream_quantized(model, "rowwise"))
    model.blocks[0].attention.q_proj.weight.ds_id = 1
    with pytest.raises(OptionError, match="DeepSpeed's stage 3"):
        stream_quantized(model, "rowwise")


def test_shards_stream_what_the_whole_model_does(told):
    assert told["streams"] == [[True] * 6] * 2
