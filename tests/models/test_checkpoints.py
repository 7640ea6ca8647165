"""`load_quantized` on language models of transformers, with checkpoints that compressed-tensors itself has written."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_inductor import load_quantized, ops
from te_inductor.ops.stored_weight import NVFP4Weight, StoredWeight
from tests.checkpoints import fp8_blocks, fp8_tensor, nvfp4_modelopt, write

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("without_tracing")

# compressed-tensors' names of schemes, and the recipes that their weights are stored as
PRESETS = {
    "FP8": "current",
    "FP8_DYNAMIC": "rowwise",
    "FP8_BLOCK": "block",
    "NVFP4": "nvfp4_weight_only",
    "NVFP4A16": "nvfp4_weight_only",
}
QUICK = ("FP8_DYNAMIC", "NVFP4")


def llama(device: str = "cpu", tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).eval()


def compress(model: nn.Module, preset: str, folder: Path) -> dict[str, Tensor]:
    """What the package writes, and what it reads back, by name. Its caller, llm-compressor, computes the scales."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import save_file

    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    quantized = {name: one for name, one in model.named_modules() if getattr(one, "quantization_scheme", None)}
    for layer in quantized.values():
        weight, arguments, more = layer.weight.data, layer.quantization_scheme.weights, {}
        blocks = scales_of(weight, arguments.strategy)
        if hasattr(layer, "weight_global_scale"):
            more["global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
            layer.weight_global_scale.data.copy_(more["global_scale"])
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, **more)
        layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
    package = ModelCompressor.from_pretrained_model(model)
    package.compress_model(model)
    folder.mkdir(exist_ok=True)
    save_file({key: one.contiguous() for key, one in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    package.update_config(folder)
    package.decompress_model(model)
    return {f"{name}.weight": layer.weight.detach() for name, layer in quantized.items()}


def scales_of(weight: Tensor, strategy: str) -> Tensor:
    """The values that share a scale, in the last dimension."""
    n, k = weight.shape
    if strategy == "tensor":
        return weight.reshape(1, -1)
    if strategy == "channel":
        return weight.reshape(n, 1, k)
    if strategy == "block":
        padded = F.pad(weight, (0, -k % 128, 0, -n % 128))
        tiles = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        return tiles.permute(0, 2, 1, 3).flatten(2)
    return weight.view(n, k // 16, 16)


def check_layers(model: nn.Module, values: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Each linear layer multiplies by the values that the checkpoint means; the model's logits are returned."""
    checked = []

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        x = inputs[0].flatten(0, -2)
        if isinstance(layer.weight, StoredWeight) and not isinstance(layer.weight, NVFP4Weight):
            quantizer = layer.weight.recipe.slots().input
            x = ops.dequantize(*ops.quantize(x, quantizer), quantizer, x.dtype)[:, : x.shape[1]]
        expected = F.linear(x, values[names[layer]])
        torch.testing.assert_close(y.flatten(0, -2), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
        checked.append(layer)

    names = {one: f"{path}.weight" for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    handles = [layer.register_forward_hook(hook) for layer in names]
    with torch.no_grad():
        logits = model(ids).logits
    for handle in handles:
        handle.remove()
    assert set(checked) == set(names)
    return logits


@pytest.mark.filterwarnings("ignore::te_inductor.errors.FallbackWarning")
@pytest.mark.parametrize(
    "preset", [one if one in QUICK else pytest.param(one, marks=pytest.mark.thorough) for one in PRESETS]
)
def test_compressed_tensors(preset, tmp_path):
    """The model is on the meta device; lm_head is ignored. FP8 as the package reads it, NVFP4 as it does in bf16, its
    own dtype."""
    source = llama()
    expected = compress(source, preset, tmp_path)
    model = load_quantized(llama("meta"), tmp_path)
    assert len(expected) == 14 and type(model.lm_head.weight) is nn.Parameter
    for name, value in expected.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, StoredWeight) and weight.recipe.name == PRESETS[preset]
        assert torch.equal(weight.dequantize().to(value.dtype), value)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(model.get_parameter(name), source.get_parameter(name))
    full = load_quantized(llama(), tmp_path, dequantize=True)
    ids = torch.randint(0, 64, (2, 9))
    logits = check_layers(model, dict(full.named_parameters()), ids)
    with torch.no_grad():
        plain = full(ids).logits
        compiled = torch.compile(model, backend="te", options={"recipe": "none"})(ids).logits
    torch.testing.assert_close(compiled, logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    if PRESETS[preset] == "nvfp4_weight_only":
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5 * plain.abs().max().item())
    else:  # activations are cast too: e4m3's relative error, 2**-4, grown by the layers behind
        assert (logits - plain).norm() < 0.25 * plain.norm()


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_modelopt(tied, tmp_path):
    """There is no file of the head, where it is tied; half of the layers in NVFP4, half in FP8."""
    source = llama(tied=tied)
    tensors, values = write(source, nvfp4_modelopt, ignored=("lm_head",))
    for name in [name for name in values if "mlp" in name and name in dict(source.named_parameters())]:
        for suffix in ("", "_scale", "_scale_2"):
            del tensors[name + suffix]
        parts, values[name] = fp8_tensor(source.get_parameter(name).detach())
        tensors |= {name + suffix: part for suffix, part in parts.items()}
    if tied:
        del tensors["lm_head.weight"]
    model = load_quantized(llama("meta", tied), tensors)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    check_layers(model, values, torch.randint(0, 64, (2, 9)))
    assert {one.weight.recipe.name for one in model.model.modules() if isinstance(one, nn.Linear)} == {
        "nvfp4_weight_only",
        "current",
    }


def test_fine_grained():
    """Values are what transformers' own dequantization reads; the model generates, and its masters train."""
    own = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors, values = write(llama(), fp8_blocks, ignored=("lm_head",))
    model = load_quantized(llama("meta"), tensors)
    check_layers(model, values, torch.randint(0, 64, (2, 9)))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        theirs = own._dequantize_fp8_weight(tensors[name], tensors[f"{name}_scale_inv"], [128, 128], torch.float32)
        assert torch.equal(model.get_parameter(name).dequantize(), theirs)
    prompt = torch.randint(0, 64, (1, 16))
    lengths = {"min_new_tokens": 3, "max_new_tokens": 3}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **lengths)
    assert tokens.shape == (1, 19)
    masters = load_quantized(llama("meta"), tensors, dequantize=True).train()
    step = torch.compile(masters, backend="te", options={"recipe": "current", "fallback": "error"})
    step(prompt, labels=prompt).loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in masters.parameters())
