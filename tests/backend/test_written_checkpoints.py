"""`quantized_state_dict`: stored weights that a file of safetensors holds are the same when they are loaded again."""

import pytest
import torch
from torch import nn

from te_inductor import load_quantized, quantize_, quantized_state_dict, recipes
from te_inductor.errors import OptionError, StoredWeightError
from te_inductor.ops.stored_weight import StoredWeight

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


def test_published_scales_are_kept(tmp_path):
    """The scales are those of a checkpoint, which are no powers of two."""
    model = load_quantized(
        toy(), quantized_state_dict(quantize_(toy(), recipes.Float8RowwiseScaling(power_2_scale=False)))
    )
    again = load_quantized(toy(), quantized_state_dict(model))
    assert again[0].weight.recipe == model[0].weight.recipe == recipes.Float8RowwiseScaling(power_2_scale=False)
    assert all(map(torch.equal, again[0].weight.parts, model[0].weight.parts))


def test_what_no_format_has():
    model = quantize_(toy(columns=40), "nvfp4_weight_only")
    with pytest.raises(
        StoredWeightError, match=r"0\.weight is NVFP4Weight\(160 x 40.*expected K to be a multiple of 16"
    ):
        quantized_state_dict(model)
    with pytest.raises(OptionError, match=r"quantized_state_dict's model is a dict .*expected an nn\.Module"):
        quantized_state_dict({})
