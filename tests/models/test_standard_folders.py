"""Folders that `save_pretrained` writes of stored weights, in a process that has no te_inductor: transformers and
compressed-tensors read the same values; and in ours, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pretrained = pytest.importorskip("te_inductor.integrations.pretrained")
pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

import te_inductor  # noqa: E402
from te_inductor.errors import StoredWeightError  # noqa: E402
from te_inductor.ops.stored_weight import StoredWeight  # noqa: E402
from tests.support import plain_loader  # noqa: E402
from tests.support.once import made_once  # noqa: E402
from tests.support.pretrained import llama, load, transformers  # noqa: E402

EVEN = {"hidden_size": 128, "intermediate_size": 256}  # multiples of 128, but for k and v, which are one block
RAGGED = {"hidden_size": 192, "intermediate_size": 320}
EXPERTS = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
}
# recipe, policy, sizes; and the method that config.json says
CASES = {
    "current": ("current", {}, RAGGED, "compressed-tensors"),
    "rowwise": ("rowwise", {"lm_head": "none", "*layers.1.mlp.*": "none"}, RAGGED, "compressed-tensors"),
    "published": (te_inductor.recipes.Float8RowwiseScaling(power_2_scale=False), {}, EVEN, "compressed-tensors"),
    "block": ("block", {"lm_head": "none", "model.layers.0.mlp.down_proj": "none"}, EVEN, "fp8"),
    "block_of_200_rows": ("block", {}, EVEN | {"vocab_size": 200}, "compressed-tensors"),
    "nvfp4": ("nvfp4_weight_only", {"lm_head": "none"}, RAGGED, "compressed-tensors"),
    "mixed": (
        "nvfp4_weight_only",
        {"lm_head": "none", "*.mlp.*": "rowwise", "*layers.1.self_attn.*": "block"},
        EVEN,
        "compressed-tensors",
    ),
    "experts_rowwise": ("rowwise", {}, EXPERTS, "compressed-tensors"),
    "experts_block": ("block", {"lm_head": "none"}, EXPERTS, "fp8"),
}
QUICK = ("current", "block", "nvfp4", "mixed", "experts_rowwise")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]


def experts():
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS)).eval()


def stored(name):
    recipe, policy, sizes, _ = CASES[name]
    return te_inductor.quantize_((experts() if sizes is EXPERTS else llama(**sizes)).bfloat16(), recipe, policy)


def values(model):
    """What each parameter means."""
    return {
        name: one.dequantize() if isinstance(one, StoredWeight) else one.detach()
        for name, one in model.named_parameters()
    }


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """The folder of each case of this run, and what a process without te_inductor has found there: one for all."""
    asked = [item.callspec.params["name"] for item in request.session.items if "folders" in item.fixturenames]
    names = list(dict.fromkeys(asked))

    def make(root: Path) -> None:
        for name in names:
            pretrained.make_savable(stored(name)).save_pretrained(root / name)
        program = [sys.executable, plain_loader.__file__, str(root / "found.pt"), *(str(root / name) for name in names)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=root)
        assert done.returncode == 0, done.stderr[-4000:]

    found = torch.load(made_once(tmp_path_factory, "standard", make) / "found.pt")
    return {Path(folder).name: (Path(folder), one) for folder, one in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_alone_reads_the_same(name, folders):
    folder, found = folders[name]
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == CASES[name][3]
    expected = values(stored(name))
    for how, one in found.items():
        assert one["lost"] == {}, how
        assert one["weights"].keys() >= expected.keys() or how == "body"
        for key, value in one["weights"].items():
            meant = expected.get(key, expected.get(f"model.{key}"))
            if meant is None:  # a scale
                continue
            if how != "dequantized" and name in ("current", "published"):
                # compressed-tensors rounds the scale and the product to the model's bf16, 2**-9 each
                torch.testing.assert_close(value.float(), meant.float(), rtol=2**-7, atol=0)
            else:
                assert torch.equal(value, meant), (how, key)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_values(name, folders):
    """The model in high precision with the values of the folder. compressed-tensors casts activations to FP8 as well:
    each has a relative error of at most 2**-4, which the layers behind grow."""
    _, found = folders[name]
    config = (experts() if CASES[name][2] is EXPERTS else llama(**CASES[name][2])).config
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16
    ).eval()  # rotary tables stay fp32
    model.load_state_dict(values(stored(name)))
    with torch.no_grad():
        expected = model(plain_loader.IDS).logits.float()
    if "dequantized" in found:
        assert torch.equal(found["dequantized"]["logits"].float(), expected)
    logits = found["as_it_is"]["logits"].float()
    if CASES[name][3] == "fp8" or name == "nvfp4":  # transformers has no FP8 on a CPU, and NVFP4's activations stay
        assert torch.equal(logits, expected)
    else:
        assert 0 < (logits - expected).norm() < 0.25 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_our_own_process_has_what_was_stored(name, folders):
    folder, _ = folders[name]
    model, again = stored(name), load(folder)
    for (key, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert type(one.data) is type(other.data), key
        pairs = zip(one.parts, other.parts, strict=True) if isinstance(one, StoredWeight) else [(one, other)]
        assert all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in pairs)
        assert getattr(one, "recipe", None) == getattr(other, "recipe", None)


def test_experts_in_nvfp4_are_not_written(tmp_path):
    """transformers would read them without a scale, and say nothing."""
    model = te_inductor.quantize_(experts(), "nvfp4_weight_only")
    with pytest.raises(
        StoredWeightError, match=r"gate_up_proj is stored as nvfp4_weight_only, expected experts in FP8"
    ):
        pretrained.make_savable(model)
    hf = pretrained.make_savable(te_inductor.quantize_(experts(), "rowwise"))
    hf.model.layers[0].mlp.experts = model.model.layers[0].mlp.experts
    with pytest.raises(StoredWeightError, match="expected experts in FP8"):
        hf.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_programs_would_multiply_otherwise(tmp_path):
    """A warning says so where it is written."""
    model = llama(**EVEN)
    scales = te_inductor.quantize_(model, "nvfp4_weight_only").model.layers[0].self_attn
    assert scales.q_proj.weight.tensor_scale == scales.k_proj.weight.tensor_scale == scales.v_proj.weight.tensor_scale
    with torch.no_grad():
        scales.q_proj.weight.copy_(torch.randn(128, 128))
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.q_proj.* have 2 scales of the tensor, expected one"):
        pretrained.make_savable(model).save_pretrained(tmp_path)
    ragged = te_inductor.quantize_(llama(**RAGGED), "block")
    with pytest.warns(UserWarning, match=r"q_proj.*: K is no multiple of 128.*\"rowwise\" runs there"):
        pretrained.make_savable(ragged).save_pretrained(tmp_path)


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4_weight_only"])
def test_folders_of_older_versions(recipe, tmp_path):
    """Their method is te_inductor's own; keys of NVFP4 are ModelOpt's."""
    from safetensors.torch import save_file

    from te_inductor.api.checkpoint_formats.nvfp4 import DECODED

    model = te_inductor.quantize_(llama(), recipe)
    pretrained.make_savable(model).save_pretrained(tmp_path)
    if recipe == "nvfp4_weight_only":
        tensors = {}
        for name, one in model.named_parameters():
            is_stored = isinstance(one, StoredWeight)
            tensors |= DECODED.tensors(name, one.saved(), *one.shape) if is_stored else {name: one.detach()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "te_inductor", "recipe": recipe, "policy": {}, "recipes": [recipe]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for again in (load(tmp_path), te_inductor.load_quantized(llama(), tmp_path)):
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert getattr(one, "recipe", None) == getattr(other, "recipe", None)
            for x, y in zip(getattr(one, "parts", ()), getattr(other, "parts", ()), strict=True):
                assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
