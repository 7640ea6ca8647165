"""peft's adapters: merged into a base whose weights are stored, and the names of layers beside them."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
adapters = pytest.importorskip("te_inductor.integrations.peft")

import te_inductor  # noqa: E402
from te_inductor.errors import OptionError, StoredWeightError  # noqa: E402
from te_inductor.ops.stored_weight import StoredWeight, store  # noqa: E402
from tests.support.streamed import Decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:te_inductor. lm_head keeps its weight")


def adapted(recipe, targets, dtype=torch.float32):
    torch.manual_seed(0)
    model = te_inductor.quantize_(Decoder().to(dtype), recipe)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, init_lora_weights=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["rowwise", "current", "block", "nvfp4_weight_only"])
def test_merged_weights_are_what_the_recipe_makes_of_the_sum(recipe, dtype):
    model = adapted(recipe, ["q_proj", "o_proj"], dtype)
    expected = {}
    for block in range(2):
        for name in ("q_proj", "o_proj"):
            layer = model.base_model.model.blocks[block].attention.get_submodule(name)
            weight = layer.base_layer.weight
            values = weight.with_parts(weight.parts, torch.float32).dequantize()
            expected[f"blocks.{block}.attention.{name}.weight"] = values + layer.get_delta_weight("default").detach()
    before = dict(model.get_base_model().named_parameters())
    merged = adapters.merge_and_unload(model)
    assert type(merged) is Decoder and not any("lora" in name for name, _ in merged.named_parameters())
    attention = merged.blocks[0].attention
    for name, one in merged.named_parameters():
        if name not in expected:
            continue
        assert isinstance(one, StoredWeight) and one.dtype == dtype and one.recipe.name == recipe
        if recipe == "nvfp4_weight_only" and "q_proj" in name:  # k and v, whose scale it has
            assert one.tensor_scale == merged.get_parameter(name.replace("q_proj", "k_proj")).tensor_scale
            error = (one.with_parts(one.parts, torch.float32).dequantize() - expected[name]).abs().max()
            assert error < expected[name].abs().max() / 6
            continue
        again = store(expected[name], one.recipe)
        assert all(map(torch.equal, map(bytes_of, again.parts), map(bytes_of, one.parts)))
    if recipe != "nvfp4_weight_only":
        assert attention.k_proj.weight is before["blocks.0.attention.k_proj.weight"]


def bytes_of(part):
    return part.contiguous().view(-1).view(torch.uint8)


def test_peft_itself_is_refused_and_says_what_to_call():
    model = adapted("rowwise", ["q_proj"])
    with pytest.raises(StoredWeightError, match=r"integrations\.peft\.merge_and_unload\(model\) merges adapters"):
        model.merge_and_unload()
    with pytest.raises(OptionError, match="expected a PeftModel"):
        adapters.merge_and_unload(nn.Linear(4, 4))


def test_a_failed_merge_leaves_its_layers_stored(monkeypatch):
    model = adapted("rowwise", ["q_proj"])
    layer = model.base_model.model.blocks[0].attention.q_proj
    monkeypatch.setattr(type(layer), "merge", lambda self, **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapters.merge_and_unload(model)
    assert isinstance(layer.base_layer.weight, StoredWeight)


@pytest.mark.parametrize("wrap", ["peft", "compiled", "compiled_layer", "both"])
def test_globs_are_paths_of_the_model_as_its_author_knows_it(wrap):
    """Adapters stay as they are: their weights are trained."""
    model = Decoder()
    if wrap in ("peft", "both"):
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    if wrap == "compiled_layer":
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    if wrap in ("compiled", "both"):
        model = torch.compile(model, backend="eager")
    te_inductor.quantize_(model, "rowwise", policy={"blocks.1.attention.q_proj": "none"}, fallback="silent")
    stored = {name for name, one in model.named_parameters() if isinstance(one, StoredWeight)}
    assert len(stored) == 9 and not any("lora" in name for name in stored)
    assert not any(".1." in name and "q_proj" in name for name in stored)
