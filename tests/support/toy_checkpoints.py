"""A small model, and its checkpoints in each published format, also as files."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from te_inductor.ops.stored_weight import StoredWeight
from tests.checkpoints import WRITERS, write


def toy(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """No size fills a block of 128."""
    layers = nn.Linear(96, 160), nn.LayerNorm(160), nn.SiLU(), nn.Linear(160, 48, bias=False)
    return nn.Sequential(*layers, nn.Linear(48, 16)).to(dtype)


def checkpoint(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Tensors, the values they mean, and a recipe's name; the last layer is in high precision."""
    writer, recipe = WRITERS[name]
    return *write(toy(), writer, ignored=("4",)), recipe


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
