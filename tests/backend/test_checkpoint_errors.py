"""What `load_quantized` refuses: files, configurations, keys, arguments; the model is left as it was."""

import copy
import json

import pytest
import torch
from torch import nn

from te_inductor import load_quantized
from te_inductor.errors import CheckpointError, FallbackError, FallbackWarning, OptionError
from tests.support.toy_checkpoints import assert_unchanged, checkpoint, save, state, toy


def test_files_that_cannot_be_read(tmp_path):
    pytest.importorskip("safetensors")
    tensors, _, _ = checkpoint("fine_grained")
    save(tmp_path, tensors, 2)
    first = tmp_path / "model-00001-of-00002.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    good, listed = first.read_bytes(), index.read_text()

    def refused(match, path=tmp_path):
        model, before = toy(), None
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=match):
            load_quantized(model, path)
        assert_unchanged(model, before)

    first.write_bytes(good[:100])
    refused("cannot be read as safetensors.*download it again")
    first.unlink()
    refused("lacks model-00001-of-00002.safetensors, which model.safetensors.index.json names")
    first.write_bytes(good)
    index.write_text(json.dumps({"weight_map": json.loads(listed)["weight_map"] | {"x": first.name}}))
    refused("x: not in model-00001-of-00002.safetensors")
    refused("does not exist, expected a folder; huggingface_hub", tmp_path / "absent")
    refused(r"is no \.safetensors file", index)
    (tmp_path / "empty").mkdir()
    refused(r"has no \.safetensors file, expected model.safetensors", tmp_path / "empty")
    refused("is an int", 3)


@pytest.mark.parametrize(
    ("configuration", "match"),
    [
        ({"quant_method": "gptq"}, "quant_method: found 'gptq', expected one of fp8, compressed-tensors, modelopt"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size: found \[64, 64\], expected \[128, 128\]",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format: found 'pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "transform_config.config_groups: found",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: found 'sparse-24-bitmask'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo: found 'W4A16_AWQ'"),
    ],
)
def test_configurations_that_are_refused(configuration, match, tmp_path):
    """What keys do not show."""
    pytest.importorskip("safetensors")
    folder = save(tmp_path, checkpoint("fine_grained")[0], config={"quantization_config": configuration})
    with pytest.raises(CheckpointError, match=match):
        load_quantized(toy(), folder)


def _without(*keys):
    return lambda tensors: [tensors.pop(key) for key in keys]


def _with(**tensors):
    return lambda found: found.update({key.replace("__", "."): value for key, value in tensors.items()})


def _renamed(tensors):
    for key in list(tensors):
        tensors[f"model.{key}"] = tensors.pop(key)


WRONG = {
    "missing": ("fine_grained", _without("4.weight"), "4.weight: found nothing; is it"),
    "no scale": (
        "fine_grained",
        _without("0.weight_scale_inv"),
        r"0.weight: found weight float8_e4m3fn \[160, 96\].*expected, of fine-grained FP8 \(transformers\), "
        r"0.weight_scale_inv: found nothing, expected float32 .*\[2, 1\]",
    ),
    "no values": ("compressed_nvfp4", _without("3.weight_packed"), r"expected uint8 \[48, 80\]"),
    "shape of the weight": (
        "modelopt_nvfp4",
        _with(**{"0__weight": torch.zeros(160, 47, dtype=torch.uint8)}),
        r"0.weight: found uint8 \[160, 47\], expected uint8 \[160, 48\]",
    ),
    "shape of the scale": (
        "fine_grained",
        _with(**{"3__weight_scale_inv": torch.ones(2, 2)}),
        r"3.weight_scale_inv: found float32 \[2, 2\], expected .*\[1, 2\]",
    ),
    "dtype of the weight": (
        "fine_grained",
        _with(**{"3__weight": torch.zeros(48, 160).to(torch.float8_e5m2)}),
        r"3.weight: found float8_e5m2 \[48, 160\], expected float8_e4m3fn",
    ),
    "dtype of the scale": (
        "compressed_nvfp4",
        _with(**{"3__weight_scale": torch.ones(48, 10)}),
        r"3.weight_scale: found float32 \[48, 10\], expected float8_e4m3fn \[48, 10\]",
    ),
    "shape of another": (
        "fine_grained",
        _with(**{"4__bias": torch.ones(17)}),
        r"4.bias: found float32 \[17\], expected shape \[16\]",
    ),
    "no tensor": ("fine_grained", _with(**{"4__bias": 3}), "4.bias: found bias a int"),
    "global scale": (
        "compressed_nvfp4",
        _with(**{"3__weight_global_scale": torch.zeros(1)}),
        "3.weight_global_scale: found 0.0, expected a factor whose reciprocal",
    ),
    "unexpected": ("fine_grained", _with(**{"5__weight": torch.ones(2)}), "5.weight: the model has no such name"),
    "prefix": ("fine_grained", _renamed, "0.bias: found nothing; is it model.0.bias"),
    "awq": (
        "modelopt_nvfp4",
        _with(**{"0__pre_quant_scale": torch.ones(96)}),
        r"0.pre_quant_scale: activations would have to be multiplied by it \(AWQ, SVDQuant\)",
    ),
    "zero point": ("compressed_channel", _with(**{"0__weight_zero_point": torch.ones(160, 1)}), "not symmetric"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_key_that_does_not_fit(case):
    name, change, match = WRONG[case]
    tensors, _, _ = checkpoint(name)
    change(tensors)
    for where in ("cpu", "meta"):
        with torch.device(where):
            model = toy()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=match):
            load_quantized(model, tensors)
        if where == "cpu":
            assert_unchanged(model, before)
        assert all(one.device.type == where for one in model.parameters())


def test_every_key_has_its_line():
    tensors, _, _ = checkpoint("fine_grained")
    with pytest.raises(CheckpointError) as caught:
        load_quantized(toy(), {f"a.{key}": value for key, value in tensors.items() if key != "0.weight_scale_inv"})
    lines = str(caught.value).splitlines()
    assert lines[0] == "the state_dict does not fit the Sequential:"
    assert {line.split(":")[0].strip() for line in lines[1:]} == set(toy().state_dict()) | {
        f"a.{key}" for key in tensors if key != "0.weight_scale_inv"
    }
    with pytest.raises(CheckpointError, match=r"\n  and 81 more$"):
        load_quantized(nn.Linear(2, 2), {f"x{i}": torch.ones(1) for i in range(99)})


def test_other_wrong_arguments():
    with pytest.raises(OptionError, match="model is an int"):
        load_quantized(3, {})
    with pytest.raises(OptionError, match="dequantize is a str"):
        load_quantized(toy(), {}, dequantize="yes")
    with pytest.raises(OptionError, match="fallback"):
        load_quantized(toy(), {}, fallback="never")


def test_scales_of_activations_are_not_used():
    """One sentence, whatever their number; nothing is loaded where that is an error."""
    tensors, values, _ = checkpoint("modelopt_tensor")
    more = {"0.input_scale": torch.ones(()), "3.input_scale": torch.ones(()), "3.k_scale": torch.ones(())}
    with pytest.warns(FallbackWarning, match=r"0.input_scale and 2 more scales of the state_dict are not used") as said:
        model = load_quantized(toy(), tensors | more)
    assert len(said) == 1 and torch.equal(state(model)["0.weight"], values["0.weight"])
    model = toy()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FallbackError, match=r"0.input_scale"):
        load_quantized(model, tensors | more, fallback="error")
    assert_unchanged(model, before)
    load_quantized(model, tensors | more, fallback="silent")
