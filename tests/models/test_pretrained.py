"""`from_pretrained` and `save_pretrained` of transformers with stored weights."""

import json

import pytest
import torch

pretrained = pytest.importorskip("te_inductor.integrations.pretrained")

import te_inductor  # noqa: E402
from te_inductor.errors import CheckpointError, OptionError, RecipeError, StoredWeightError  # noqa: E402
from te_inductor.ops.stored_weight import StoredWeight  # noqa: E402
from tests.support.pretrained import assert_same, llama, load, transformers  # noqa: E402


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("recipe", "policy"), [("rowwise", {}), ("nvfp4_weight_only", {"lm_head": "block"}), ("current", {"*mlp*": "none"})]
)
@pytest.mark.filterwarnings("ignore:te_inductor. lm_head keeps its weight")  # where it is the embedding's
@pytest.mark.filterwarnings("ignore:te_inductor. lm_head.weight. K is")  # blocks of 64 columns
def test_a_model_is_stored_as_it_is_loaded_and_saved_as_it_is(recipe, policy, tied, tmp_path):
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "plain")
    config = pretrained.StoredWeightsConfig(recipe, policy)
    stored = load(tmp_path / "plain", quantization_config=config)
    assert_same(stored, te_inductor.quantize_(llama(tie_word_embeddings=tied), recipe, policy))
    stored.save_pretrained(tmp_path / "stored", max_shard_size="50KB")
    assert (tmp_path / "stored" / "model.safetensors.index.json").exists()
    again = load(tmp_path / "stored")
    assert_same(again, stored)
    assert {one.recipe for one in again.parameters() if isinstance(one, StoredWeight)} == {
        one.recipe for one in stored.parameters() if isinstance(one, StoredWeight)
    }
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied


def test_nothing_is_spent_on_what_is_stored(tmp_path):
    """Stored weights are no parameters while the rest is loaded."""
    pretrained.make_savable(te_inductor.quantize_(llama(), "rowwise")).save_pretrained(tmp_path)
    quantizer = pretrained.StoredWeightsQuantizer(pretrained.StoredWeightsConfig("rowwise"), pre_quantized=True)
    with torch.device("meta"):
        model = llama()
    quantizer.preprocess_model(model, checkpoint_files=[str(tmp_path / "model.safetensors")])
    assert {name.rsplit(".", 2)[-2] for name, _ in model.named_parameters()} == {
        *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm")
    }


def test_load_quantized_takes_the_recipes_of_the_folder(tmp_path):
    stored = te_inductor.quantize_(llama(), "rowwise", {"lm_head": "none"})
    pretrained.make_savable(stored).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "compressed-tensors" and written["te_inductor"] == {"recipes": ["rowwise"]}
    assert_same(te_inductor.load_quantized(llama(), tmp_path), stored)


def test_what_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="unknown recipe of StoredWeightsConfig 'nope'"):
        pretrained.StoredWeightsConfig("nope")
    with pytest.raises(OptionError, match="expected a name"):
        pretrained.StoredWeightsConfig(te_inductor.recipes.NVFP4WeightOnly())
    with pytest.raises(RecipeError, match="has no stored weights"):
        pretrained.make_savable(llama())
    with pytest.raises(OptionError, match="expected a PreTrainedModel"):
        pretrained.make_savable(torch.nn.Linear(16, 16))
    with pytest.raises(StoredWeightError, match="found nvfp4_weight_only 40 x 40, expected K as a multiple of 16"):
        pretrained.make_savable(te_inductor.quantize_(llama(hidden_size=40), "nvfp4_weight_only"))
    folder = tmp_path / "stored"
    pretrained.make_savable(te_inductor.quantize_(llama(), "rowwise")).save_pretrained(folder)
    config = transformers.LlamaConfig.from_pretrained(folder, intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: found weight float8_e4m3fn"):
        transformers.LlamaForCausalLM.from_pretrained(folder, config=config)
