"""`load_quantized`: published checkpoints in each format, what they are stored as, files, and memory."""

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

from te_inductor import load_quantized
from te_inductor.api.checkpoint_formats import nvfp4 as nvfp4_formats
from te_inductor.errors import CheckpointError, OptionError, RecipeError
from te_inductor.ops.stored_weight import StoredWeight
from te_inductor.recipes import Float8BlockScaling, NVFP4WeightOnly
from tests.checkpoints import WRITERS, fp8_channel, fp8_tensor, nvfp4_compressed, write
from tests.support.toy_checkpoints import checkpoint, save, state, toy

pytestmark = pytest.mark.usefixtures("without_tracing")
formats = pytest.mark.parametrize("name", WRITERS)
QUICK = {"fine_grained", "compressed_channel", "modelopt_tensor", "modelopt_nvfp4"}  # one of each recipe
compiled_formats = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in WRITERS]
)


def plain(values: dict[str, Tensor]) -> nn.Module:
    model = toy()
    model.load_state_dict(values)
    return model


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
