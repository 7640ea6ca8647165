"""`load_quantized` where the model has its experts in one parameter and the checkpoint has them one by one."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from te_inductor import load_quantized
from te_inductor.errors import CheckpointError
from te_inductor.ops.stored_experts import StoredExperts
from tests.checkpoints import EXPERTS, WRITERS, Written, fp8_blocks, fp8_tensor, nvfp4_compressed, nvfp4_modelopt
from tests.checkpoints import ExpertsModel as Model

E, N, K = EXPERTS
PIECES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def checkpoint(writer, n: int = N) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each expert's layers by themselves, and what the parameters mean."""
    model = Model(n)
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    tensors = {name: one for name, one in values.items() if "norm" in name}
    for key, pieces in PIECES.items():
        for expert, matrix in enumerate(model.experts.get_parameter(key).detach()):
            for piece, part, place in zip(
                pieces,
                matrix.chunk(len(pieces)),
                values[f"experts.{key}"][expert].chunk(len(pieces)),
                strict=True,
            ):
                written, meant = writer(part)
                tensors |= {f"experts.{expert}.{piece}.weight{suffix}": one for suffix, one in written.items()}
                place.copy_(meant)
    return tensors, values


def nvfp4_one_factor(writer):
    """Writes checkpoints as they are made for kernels that multiply gate and up at once."""

    def write(weight: Tensor) -> Written:
        weight = weight.clone()
        weight[0, 0] = 6.0  # the amax of all
        return writer(weight.clamp(-6, 6))

    return write


CASES = {
    "fine_grained": (fp8_blocks, "block", "block"),
    "compressed_tensor": (WRITERS["compressed_tensor"][0], "rowwise", "current"),
    "compressed_channel": (WRITERS["compressed_channel"][0], "rowwise", "rowwise"),
    "compressed_nvfp4": (nvfp4_one_factor(nvfp4_compressed), "nvfp4_weight_only", "nvfp4_weight_only"),
    "modelopt_nvfp4": (nvfp4_one_factor(nvfp4_modelopt), "nvfp4_weight_only", "nvfp4_weight_only"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_experts(name, device):
    """Bit for bit: gate and up above each other. A scale of gate and one of up are those of their rows."""
    writer, *recipes = CASES[name]
    tensors, values = checkpoint(writer)
    with torch.device(device):
        model = Model()
    load_quantized(model, tensors)
    for key, recipe in zip(PIECES, recipes, strict=True):
        weight = model.experts.get_parameter(key)
        assert isinstance(weight, StoredExperts) and weight.recipe.name == recipe and not weight.transposed
        assert torch.equal(weight.dequantize(), values[f"experts.{key}"])
    with torch.device(device):
        model = Model()
    load_quantized(model, tensors, dequantize=True)
    assert all(type(one) is nn.Parameter and one.requires_grad for one in model.parameters())
    assert all(torch.equal(one, values[key]) for key, one in model.named_parameters())


def test_experts_in_high_precision():
    """The checkpoint ignored them: one by one, or as one parameter."""
    tensors, values = checkpoint(lambda weight: ({"": weight.bfloat16()}, weight.bfloat16().float()))
    model = load_quantized(Model(), tensors)
    assert all(type(one) is nn.Parameter and torch.equal(one, values[key]) for key, one in model.named_parameters())
    again = load_quantized(Model(), values)
    assert all(torch.equal(one, values[key]) for key, one in again.named_parameters())


def refused(tensors: dict[str, Tensor], match: str, n: int = N) -> None:
    model = Model(n)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=match):
        load_quantized(model, tensors)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_scales_that_one_matrix_cannot_have():
    """Such experts load as plain values."""
    tensors, values = checkpoint(nvfp4_compressed)
    refused(tensors, r"experts.0.up_proj.weight_global_scale: found .*of one expert's matrix; pass dequantize=True")
    model = load_quantized(Model(), tensors, dequantize=True)
    assert torch.equal(model.experts.gate_up_proj, values["experts.gate_up_proj"])
    tensors, values = checkpoint(fp8_blocks, 192)
    refused(tensors, r"experts.0.gate_proj.weight: found 96 rows, expected a multiple of 128.*dequantize=True", 192)
    model = load_quantized(Model(192), tensors, dequantize=True)
    assert torch.equal(model.experts.gate_up_proj, values["experts.gate_up_proj"])


def test_experts_of_two_formats():
    tensors, values = checkpoint(fp8_blocks)
    name = "experts.1.down_proj.weight"
    parts, values["experts.down_proj"][1] = fp8_tensor(torch.randn(K, N // 2))
    del tensors[f"{name}_scale_inv"]
    tensors |= {name + suffix: part for suffix, part in parts.items()}
    refused(tensors, f"{name}: in another format than experts.0.down_proj.weight".replace(".", r"\."))
    model = load_quantized(Model(), tensors, dequantize=True)
    assert torch.equal(model.experts.down_proj, values["experts.down_proj"])


def test_experts_that_are_not_there():
    tensors, _ = checkpoint(fp8_blocks)
    lost = {key: one for key, one in tensors.items() if not key.startswith("experts.2.up_proj")}
    refused(lost, r"experts.2.up_proj.weight: found nothing, expected a part of experts.gate_up_proj")
    shorter = {key: one for key, one in tensors.items() if "experts.1.gate_proj" not in key}
    shorter |= {"experts.1.gate_proj.weight": torch.zeros(7, K)}
    refused(shorter, r"experts.1.gate_proj.weight: found float32 \[7, 96\], expected shape \[128, 96\]")
    refused(
        tensors | {"experts.3.up_proj.weight": torch.zeros(1)}, r"experts.3.up_proj.weight: the model has its experts"
    )
    others = {key.replace("gate_proj", "w1"): one for key, one in tensors.items() if "up_proj" not in key}
    refused(others, r"experts.0.w1.weight: .* one parameter, experts.down_proj, whose parts")
    transposed = Model()
    transposed.experts.is_transposed = True
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj: it is transposed"):
        load_quantized(transposed, tensors)


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.parametrize("name", ["fine_grained", pytest.param("modelopt_nvfp4", marks=pytest.mark.thorough)])
def test_a_model_of_transformers(name, tmp_path):
    """Names are those of its own save_pretrained, and as FP8 checkpoints of it are published."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        written, _ = CASES[name][0](tensors.pop(key))
        tensors |= {key + suffix: one for suffix, one in written.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = json.loads((tmp_path / "config.json").read_text())
    found["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with torch.device("meta"):
        model, full = (transformers.Qwen3MoeForCausalLM(config).eval() for _ in range(2))
    load_quantized(model, tmp_path)
    load_quantized(full, tmp_path, dequantize=True)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts.gate_up_proj, StoredExperts) and isinstance(experts.down_proj, StoredExperts)
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        logits, plain = model(ids).logits, full(ids).logits
        compiled = torch.compile(model, backend="te", options={"recipe": "none"})(ids).logits
    torch.testing.assert_close(compiled, logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    # FP8 casts activations as well; a router may then choose another expert of those that are nearly as good
    bound = 1e-5 if CASES[name][1] == "nvfp4_weight_only" else 0.25
    assert (logits - plain).norm() <= bound * plain.norm()
