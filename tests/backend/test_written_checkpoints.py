"""`quantized_state_dict`: stored weights that a file of safetensors holds are the same when they are loaded again."""

import json

import pytest
import torch
from torch import nn

from te_inductor import load_quantized, quantize_, quantized_state_dict, recipes
from te_inductor.api.checkpoint_formats.nvfp4 import factor_of
from te_inductor.api.written_checkpoints import written
from te_inductor.api.written_recipes import from_json, to_json
from te_inductor.errors import OptionError, RecipeError, StoredWeightError
from te_inductor.ops.stored_weight import StoredWeight
from tests.checkpoints import ExpertsModel as Model

STORED = ("current", "rowwise", "block", "nvfp4_weight_only")


def toy(columns: int = 96) -> nn.Module:
    """No size fills a block of 128; a layer in high precision, a tied one, and one in bf16."""
    model = nn.Sequential(
        nn.Linear(columns, 160), nn.LayerNorm(160), nn.Linear(160, 160), nn.Linear(160, 160, bias=False)
    )
    model[3].weight = model[2].weight
    model.append(nn.Linear(160, 48, dtype=torch.bfloat16)).append(nn.Linear(48, 7))
    return model.eval()


@pytest.mark.parametrize("recipe", STORED)
def test_a_file_holds_stored_weights(recipe, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = quantize_(toy(), recipe, policy={"5": "none"})
    safetensors.save_file(quantized_state_dict(model), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = toy()
    again = load_quantized(empty, tmp_path, recipes=[recipe])
    assert again[3].weight is again[2].weight
    for name, tensor in model.state_dict().items():
        other = again.state_dict()[name]
        if isinstance(tensor, StoredWeight):
            assert isinstance(other, StoredWeight) and other.recipe == tensor.recipe and other.dtype == tensor.dtype
            for one, two in zip(tensor.parts, other.parts, strict=True):
                assert one.dtype == two.dtype and torch.equal(
                    one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)
                )
        else:
            assert name in ("1.weight", "1.bias", "5.weight") or name.endswith("bias")
            assert torch.equal(tensor, other)


def test_keys_are_the_models_own():
    model = quantize_(toy(), "rowwise", policy={"5": "none"})
    keys = quantized_state_dict(model).keys()
    model[0] = torch.compile(model[0], backend="eager")
    assert quantized_state_dict(torch.compile(model, backend="eager")).keys() == keys


def test_published_scales_are_kept(tmp_path):
    """The scales are those of a checkpoint, which are no powers of two."""
    model = load_quantized(
        toy(), quantized_state_dict(quantize_(toy(), recipes.Float8RowwiseScaling(power_2_scale=False)))
    )
    again = load_quantized(toy(), quantized_state_dict(model))
    assert again[0].weight.recipe == model[0].weight.recipe == recipes.Float8RowwiseScaling(power_2_scale=False)
    assert all(map(torch.equal, again[0].weight.parts, model[0].weight.parts))


# What vLLM's loaders register for a linear layer (N, K), as checkpoints have it: CompressedTensorsW8A8Fp8 (weight_scale of
# one number a shard, of channels, of blocks) and CompressedTensorsW4A16Fp4 of model_executor/layers/quantization/
# compressed_tensors/schemes, at de4766a and 17b6501; Fp8LinearMethod of model_executor/layers/quantization/fp8.py, at an
# older commit.
E4M3, FP32 = torch.float8_e4m3fn, torch.float32
VLLM = {
    "current": {"weight": (E4M3, (256, 384)), "weight_scale": (FP32, (1,))},
    "rowwise": {"weight": (E4M3, (256, 384)), "weight_scale": (FP32, (256, 1))},
    "block": {"weight": (E4M3, (256, 384)), "weight_scale_inv": (FP32, (2, 3))},
    "nvfp4_weight_only": {
        "weight_packed": (torch.uint8, (256, 192)),
        "weight_scale": (E4M3, (256, 24)),
        "weight_global_scale": (FP32, (1,)),
    },
}


@pytest.mark.parametrize("recipe", STORED)
def test_keys_and_shapes_are_those_of_vllm(recipe):
    model = nn.ModuleDict({"up_proj": nn.Linear(384, 256), "lm_head": nn.Linear(384, 64)})
    tensors = quantized_state_dict(quantize_(model, recipe, policy={"lm_head": "none"}))
    found = {key.removeprefix("up_proj."): (one.dtype, tuple(one.shape)) for key, one in tensors.items()}
    plain = {"bias": (FP32, (256,)), "lm_head.weight": (FP32, (64, 384)), "lm_head.bias": (FP32, (64,))}
    assert found == VLLM[recipe] | plain


def test_a_configuration_names_layers_and_no_others():
    """Layers in high precision are ignored, by names that fit no layer which ends alike and is stored."""
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(128, 128), "down": nn.Linear(128, 128)}) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(128, 128)})
    model["other"] = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"down": nn.Linear(128, 128)})])})
    quantize_(model, "rowwise", policy={"head": "none", "blocks.*.down": "none"})
    configuration = written(model)[1]
    assert configuration["ignore"] == ["blocks.0.down", "blocks.1.down", "head"]
    assert configuration["config_groups"]["group_0"]["targets"] == ["Linear"]
    quantize_(blocks[1]["down"], "nvfp4_weight_only")
    configuration = written(model)[1]
    assert configuration["format"] == "mixed-precision" and configuration["ignore"] == ["blocks.0.down", "head"]
    assert [one["targets"] for one in configuration["config_groups"].values()] == [
        ["Linear"],
        [r"re:(.*\.)?blocks\.1\.down(\..*)?$"],
    ]
    squares = nn.ModuleDict({"a": nn.Linear(128, 128), "aa": nn.Linear(128, 128)})
    quantize_(squares, "block", policy={"a": "none"})  # "a" is how "aa" ends, to transformers
    assert written(squares)[1]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("seed", range(3))
def test_factors_come_back(seed):
    """Written as a factor and read as its reciprocal, a scale is the same fp32 number."""
    torch.manual_seed(seed)
    scales = 1.0 / (2688.0 / torch.rand(500).mul(20).sub(10).exp2())
    for scale in scales:
        assert 1.0 / factor_of(scale) == scale


def test_experts_are_written_one_by_one():
    for recipe in STORED:
        model = quantize_(Model(), recipe)
        tensors = quantized_state_dict(model)
        again = load_quantized(Model(), tensors, recipes=[recipe])
        for name, one in model.experts.named_parameters():
            other = again.experts.get_parameter(name)
            assert torch.equal(one.dequantize(), other.dequantize())
            # one scale an expert is read as one a row where gate and up are put together
            assert one.recipe == other.recipe or (recipe, name) == ("current", "gate_up_proj")
    transposed = Model()
    transposed.experts.is_transposed = True
    with pytest.raises(StoredWeightError, match="found transposed experts"):
        quantized_state_dict(quantize_(transposed, "rowwise"))


def test_recipes_of_any_fields_are_written():
    for recipe in (
        recipes.NVFP4WeightOnly(prefill="exact"),
        recipes.Float8RowwiseScaling(backward="high_precision"),
        recipes.Float8CurrentScaling(backward={"dgrad": "block", "wgrad": "dequantized"}),
        recipes.Float8RowwiseScaling(power_2_scale=False, amax_epsilon=1e-3),
        recipes.Float8BlockScaling(
            fp8_quant_fwd_inp=recipes.QParams(amax_epsilon=0.5), fp8_format=recipes.Format.HYBRID
        ),
        recipes.Float8CurrentScaling(),
    ):
        assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    assert to_json(recipes.Float8CurrentScaling()) == "current"
    with pytest.raises(RecipeError, match=r"has no_such of NVFP4WeightOnly, expected fields among .*prefill"):
        from_json({"name": "nvfp4_weight_only", "no_such": 1})
    with pytest.raises(RecipeError, match=r"whose fields are numbers and names, as config\.json holds it"):
        to_json(recipes.Float8CurrentScaling(backward=recipes.Float8RowwiseScaling(power_2_scale=False)))
    with pytest.raises(RecipeError, match=r"recipe of a configuration is an int \(7\)"):
        from_json(7)


def test_what_no_format_has():
    model = quantize_(toy(columns=40), "nvfp4_weight_only")
    with pytest.raises(StoredWeightError, match="0: found nvfp4_weight_only 160 x 40, expected K as a multiple of 16"):
        quantized_state_dict(model)
    with pytest.raises(OptionError, match=r"quantized_state_dict's model is a dict .*expected an nn\.Module"):
        quantized_state_dict({})
