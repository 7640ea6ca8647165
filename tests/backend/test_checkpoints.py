"""`load_quantized`: published checkpoints in each format, what they are stored as, memory, and every error."""

import copy
import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from te_inductor import load_quantized
from te_inductor.api.checkpoint_formats import nvfp4 as nvfp4_formats
from te_inductor.errors import CheckpointError, FallbackError, FallbackWarning, OptionError, RecipeError
from te_inductor.ops.stored_weight import StoredWeight
from te_inductor.recipes import Float8BlockScaling, NVFP4WeightOnly
from tests.checkpoints import WRITERS, fp8_channel, fp8_tensor, nvfp4_compressed, write

pytestmark = pytest.mark.usefixtures("without_tracing")
formats = pytest.mark.parametrize("name", WRITERS)
QUICK = {"fine_grained", "compressed_channel", "modelopt_tensor", "modelopt_nvfp4"}  # one of each recipe
compiled_formats = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in WRITERS]
)


def toy(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """No size fills a block of 128."""
    layers = nn.Linear(96, 160), nn.LayerNorm(160), nn.SiLU(), nn.Linear(160, 48, bias=False)
    return nn.Sequential(*layers, nn.Linear(48, 16)).to(dtype)


def checkpoint(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Tensors, the values they mean, and a recipe's name; the last layer is in high precision."""
    writer, recipe = WRITERS[name]
    return *write(toy(), writer, ignored=("4",)), recipe


def plain(values: dict[str, Tensor]) -> nn.Module:
    model = toy()
    model.load_state_dict(values)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    """The state as bytes, to compare."""
    return {
        key: value.dequantize() if isinstance(value, StoredWeight) else value
        for key, value in model.state_dict().items()
    }


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[key] is not None and torch.equal(after[key], before[key]) for key in before)


# ---- formats


@pytest.fixture
def small_chunks(monkeypatch):
    """Makes chunks so small that every weight is converted in several."""
    monkeypatch.setattr(nvfp4_formats, "CHUNK", 1 << 10)


@pytest.mark.usefixtures("small_chunks")
@formats
def test_weights_are_those_of_the_checkpoint(name):
    """Bit for bit, as stored weights of the model's dtype; other tensors as they are."""
    tensors, values, recipe = checkpoint(name)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_quantized(toy(dtype=dtype), tensors)
        for key in ("0.weight", "3.weight"):
            weight = model.get_parameter(key)
            assert isinstance(weight, StoredWeight) and weight.recipe.name == recipe and not weight.requires_grad
            assert weight.dtype == dtype and torch.equal(weight.dequantize(), values[key].to(dtype))
        for key in values.keys() - {"0.weight", "3.weight"}:
            assert torch.equal(model.state_dict()[key], values[key].to(dtype))
            assert model.get_parameter(key).requires_grad


@pytest.mark.usefixtures("small_chunks")
@compiled_formats
def test_dequantized_parameters_train(name):
    tensors, values, _ = checkpoint(name)
    model = load_quantized(toy(), tensors, dequantize=True)
    assert all(type(one) is nn.Parameter and torch.equal(one, values[key]) for key, one in model.named_parameters())
    step = torch.compile(model, backend="te", options={"recipe": "current", "fallback": "silent"})
    step(torch.randn(32, 96)).sum().backward()
    assert all(one.grad is not None for one in model.parameters())


@compiled_formats
def test_outputs_are_those_of_the_dequantized_model(name):
    """Outputs of NVFP4 are equal up to the order of fp32 sums; FP8 besides casts activations, which here have few bits,
    so that the cast is exact."""
    tensors, values, recipe = checkpoint(name)
    first, full = load_quantized(toy(), tensors)[0], plain(values)[0]
    x = torch.randint(-7, 8, (5, 96)).float()
    x[:, 0::16] = 7.0  # every row and every block has the same amax, 7: values times 64 are e4m3 numbers
    if recipe in ("current", "rowwise", "block"):
        x = torch.where(x.abs() == 5, 4.0, x)
    with torch.no_grad():
        y, expected = first(x), full(x)
        compiled = torch.compile(first, backend="te", options={"recipe": "none"})(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(compiled, y)


@pytest.mark.codegen
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(QUICK))
def test_compiled_to_code(name):
    model = load_quantized(toy(), checkpoint(name)[0])
    x = torch.randn(5, 96)
    with torch.no_grad():
        y = torch.compile(model, backend="te", options={"recipe": "none", "fallback": "error"})(x)
        expected = model(x)
    assert (y - expected).norm() <= 1e-2 * expected.norm()  # a sum in another order may round an activation otherwise


@formats
def test_saved_and_loaded(name):
    """It is saved as any model with stored weights: by torch.save, the same bits."""
    tensors, values, _ = checkpoint(name)
    file = io.BytesIO()
    torch.save(load_quantized(toy(), tensors).state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        model = toy().requires_grad_(False)
    model.load_state_dict(torch.load(file), assign=True)
    assert all(torch.equal(state(model)[key], value) for key, value in values.items())


def test_tensors_of_a_state_dict_are_copied():
    tensors, values, _ = checkpoint("compressed_channel")
    values = copy.deepcopy(values)
    with torch.device("meta"):
        model = toy()
    load_quantized(model, tensors)
    for one in tensors.values():
        one.view(torch.uint8).fill_(1)
    assert all(torch.equal(state(model)[key], value) for key, value in values.items())


def test_layers_of_several_formats():
    """Each weight is in a format of its own."""
    model = toy()
    tensors, values = write(model, nvfp4_compressed, ignored=("0", "4"))
    del tensors["0.weight"]
    parts, values["0.weight"] = fp8_channel(model[0].weight.detach())
    tensors |= {f"0.weight{suffix}": part for suffix, part in parts.items()}
    loaded = load_quantized(toy(), tensors)
    assert [loaded[i].weight.recipe.name for i in (0, 3)] == ["rowwise", "nvfp4_weight_only"]
    assert all(torch.equal(state(loaded)[key], value) for key, value in values.items())


def test_recipes_of_the_users_choice():
    tensors, values, _ = checkpoint("modelopt_nvfp4")
    exact = NVFP4WeightOnly(prefill="exact")
    assert load_quantized(toy(), tensors, recipes=[exact])[0].weight.recipe == exact
    tensors, values, _ = checkpoint("fine_grained")
    weight = load_quantized(toy(), tensors, recipes=["block"])[0].weight
    assert weight.recipe == Float8BlockScaling() and torch.equal(weight.dequantize(), values["0.weight"])
    for wrong, error in (
        ("block", OptionError),
        (["delayed"], RecipeError),
        (["none"], RecipeError),
        ([Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)], RecipeError),
    ):
        with pytest.raises(error, match="expected"):
            load_quantized(toy(), tensors, recipes=wrong)


def test_a_quantized_model_loads_another_checkpoint():
    """The other checkpoint may be one in which a stored weight is in high precision."""
    tensors, _, _ = checkpoint("compressed_channel")
    model = load_quantized(toy(), tensors)
    tensors, values, _ = checkpoint("modelopt_nvfp4")
    tensors |= {"3.weight": values["3.weight"]}
    del tensors["3.weight_scale"], tensors["3.weight_scale_2"]
    load_quantized(model, tensors)
    assert model[0].weight.recipe == NVFP4WeightOnly() and type(model[3].weight) is nn.Parameter
    assert all(torch.equal(state(model)[key], value) for key, value in values.items())


# ---- files


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **files: object) -> Path:
    from safetensors.torch import save_file

    keys = sorted(tensors)
    parts = [keys[i::shards] for i in range(shards)]
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    )
    for name, part in zip(names, parts, strict=True):
        save_file({key: tensors[key].contiguous() for key in part}, folder / name, metadata={"format": "pt"})
    if shards > 1:
        index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("name", "shards"), [("fine_grained", 3), ("compressed_nvfp4", 1), ("modelopt_nvfp4", 2)])
def test_folders(name, shards, tmp_path):
    """Shards split a weight's values from its scales."""
    pytest.importorskip("safetensors")
    tensors, values, _ = checkpoint(name)
    configurations = {
        "fine_grained": {"config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}},
        "compressed_nvfp4": {
            "config": {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "nvfp4-pack-quantized",
                    "sparsity_config": {},
                    "transform_config": {},
                }
            }
        },
        "modelopt_nvfp4": {
            "hf_quant_config": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "group_size": 16},
            }
        },
    }
    folder = save(tmp_path, tensors, shards, **configurations[name])
    with torch.device("meta"):
        model = toy()
    load_quantized(model, folder)
    assert all(torch.equal(state(model)[key], value) for key, value in values.items())
    if shards == 1:
        again = load_quantized(toy(), str(folder / "model.safetensors"))
        assert all(torch.equal(state(again)[key], value) for key, value in values.items())


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


# ---- keys that do not fit


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


# ---- tied weights, buffers, other modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kept", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_tied_weights(kept, device):
    """Tied weights load under any of their names, and are still one tensor afterwards."""
    tensors, values = write(Tied(), nvfp4_compressed, ignored=("head",))
    tensors["seen"] = torch.tensor(7)
    for key in {"embed.weight", "head.weight"} - set(kept):
        del tensors[key]
    with torch.device(device):
        model = Tied()
    load_quantized(model, tensors)
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, values["head.weight"])
    assert model.seen.item() == 7 and isinstance(model.body.weight, StoredWeight)
    assert model(torch.arange(3)).isfinite().all()


def test_tied_weights_that_cannot_be():
    tensors, _ = write(Tied(), nvfp4_compressed, ignored=("head",))
    with pytest.raises(CheckpointError, match=r"head.weight: differs from embed.weight.*tie_word_embeddings=False"):
        load_quantized(Tied(), tensors | {"head.weight": tensors["head.weight"] + 1})
    quantized, values = write(Tied(), nvfp4_compressed)
    del quantized["embed.weight"]
    with pytest.raises(
        CheckpointError, match=r"head.weight: it is that of a module of class Embedding.*dequantize=True"
    ):
        load_quantized(Tied(), quantized)
    model = load_quantized(Tied(), quantized, dequantize=True)
    assert model.head.weight is model.embed.weight and torch.equal(model.embed.weight, values["head.weight"])
    both, _ = write(Tied(), WRITERS["modelopt_nvfp4"][0])
    both |= {f"embed.{key.partition('.')[2]}": one for key, one in both.items() if key.startswith("head.")}
    assert torch.equal(
        *(load_quantized(Tied(), both, dequantize=True).get_parameter(f"{one}.weight") for one in ("embed", "head"))
    )
    del quantized["head.weight_packed"], quantized["head.weight_scale"], quantized["head.weight_global_scale"]
    with pytest.raises(
        CheckpointError, match=r"embed.weight: found nothing, nor head.weight, which is the same tensor"
    ):
        load_quantized(Tied(), quantized)


def test_shared_modules_and_wrappers():
    """Names of a module that the model holds twice, and of one that was compiled."""
    layer = nn.Linear(16, 16)
    parts, values = fp8_tensor(layer.weight.detach())
    tensors = {f"1.weight{suffix}": part for suffix, part in parts.items()} | {"1.bias": layer.bias.detach()}
    model = load_quantized(nn.Sequential(nn.Identity(), torch.compile(nn.Linear(16, 16), backend="te")), tensors)
    assert torch.equal(model[1].weight.dequantize(), values)
    shared = nn.Linear(16, 16)
    model = load_quantized(nn.Sequential(shared, shared), tensors)
    assert model[0].weight is model[1].weight and torch.equal(model[0].weight.dequantize(), values)


def test_buffers_that_no_checkpoint_has():
    class Rotary(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 16))
            self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    parts, _ = fp8_tensor(torch.randn(16, 16))
    tensors = {f"0.weight{suffix}": part for suffix, part in parts.items()} | {"0.bias": torch.ones(16)}
    load_quantized(Rotary(), tensors)
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(CheckpointError, match="inv_freq: a buffer on the meta device that no checkpoint has"):
        load_quantized(model, tensors)
    Rotary._init_weights = lambda self, module: None
    with pytest.raises(CheckpointError, match=r"buffers inv_freq are on the meta device.*Rotary does not compute them"):
        load_quantized(model, tensors)
    assert model.inv_freq.is_meta and model[0].weight.is_meta
    Rotary._init_weights = lambda self, module: module.inv_freq.fill_(2)
    assert load_quantized(model, tensors).inv_freq.tolist() == [2.0] * 4


def test_keys_that_models_of_transformers_read_over():
    tensors, values, _ = checkpoint("fine_grained")
    more = tensors | {"layers.61.weight": torch.ones(2), "0.rotary_emb.inv_freq": torch.ones(4)}
    model = toy()
    with pytest.raises(CheckpointError, match=r"layers.61.weight: the model has no such name") as caught:
        load_quantized(model, more)
    assert "inv_freq" not in str(caught.value)
    model._keys_to_ignore_on_load_unexpected = [r"layers\.61\."]
    load_quantized(model, more)
    assert all(torch.equal(state(model)[key], value) for key, value in values.items())


def test_modules_of_other_classes():
    """Their weights cannot be stored, but dequantized."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 32))

    parts, values = fp8_channel(torch.randn(16, 32))
    tensors = {f"weight{suffix}": part for suffix, part in parts.items()}
    with pytest.raises(CheckpointError, match=r"weight: it is that of a module of class Own, expected nn.Linear"):
        load_quantized(Own(), tensors)
    assert torch.equal(load_quantized(Own(), tensors, dequantize=True).weight, values)
    model = nn.Linear(32, 16, bias=False).to(torch.float8_e4m3fn).requires_grad_(False)
    with pytest.raises(CheckpointError, match="without its quantization_config"):
        load_quantized(model, tensors)


# ---- memory


def peak(function, mapped: set[int]) -> tuple[int, int]:
    """Bytes that torch's allocator has given out, at most and in the end; but for maps of files of such sizes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    now = [*itertools.accumulate(one.nbytes() for one in events if abs(one.nbytes()) not in mapped)]
    return max(now), now[-1]


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("name", ["compressed_channel", "modelopt_nvfp4"])
def test_memory(name, dequantize, tmp_path, monkeypatch):
    """What is loaded, and one layer as it is stored; and the values that are converted at a time, of at least 128 rows.
    Eight layers at once would be more, and so would one as a whole."""
    pytest.importorskip("safetensors")
    chunk, n = 1 << 12, 256
    monkeypatch.setattr(nvfp4_formats, "CHUNK", chunk)

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(8)))

    folder = save(tmp_path, write(layers(), WRITERS[name][0])[0], 2)
    with torch.device("meta"):
        model = layers()
    sizes = {file.stat().st_size for file in folder.glob("*.safetensors")}
    most, left = peak(lambda: load_quantized(model, folder, dequantize=dequantize), sizes)
    held = sum(one.weight.nbytes for one in model)
    layer = n * n * (9 if "nvfp4" in name else 16) // 16 + 4 * n
    converted = 64 * (128 * n if dequantize else chunk if "nvfp4" in name else 0)
    assert held <= most <= held + layer + converted and left == held
