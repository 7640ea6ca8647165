"""compressed-tensors: FP8 with a scale a tensor, a channel or a block, and NVFP4; one folder may have several.

Sources, for the configuration: compressed-tensors 0.20, quantization/quant_scheme.py (FP8_DYNAMIC, FP8_BLOCK, NVFP4A16)
and utils/match.py; vLLM, model_executor/layers/quantization/compressed_tensors/compressed_tensors.py and utils.py, which
wants each linear layer to be a target or ignored."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from te_inductor.api.checkpoint_formats import nvfp4
from te_inductor.api.checkpoint_formats.protocol import (
    BLOCKS,
    ROWS,
    TENSOR,
    CheckpointFormat,
    Contents,
    QuantMethod,
    blocks,
    fp8,
    rows,
    scalar,
)
from te_inductor.presentation.paths import by_kind
from te_inductor.recipes.formats import BLOCK_128X128, NV_1X16

_TENSOR, _ROWS, _BLOCKS = (
    fp8(f"FP8 with a scale a {whose} (compressed-tensors, ModelOpt)", "_scale", shapes, recipe)
    for whose, shapes, recipe in (("tensor", scalar, TENSOR), ("channel", rows, ROWS), ("block", blocks, BLOCKS))
)

_FLOAT = {"type": "float", "symmetric": True}
_FP8 = _FLOAT | {"num_bits": 8}
_FP4 = _FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": NV_1X16.block[1]}
_FP4_SCALES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_LAYOUT = "float-quantized"

# What a group of layers says, for each format: how weights are, how activations are cast, and the name of both.
_SCHEMES: Mapping[str, dict[str, Any]] = {
    _TENSOR.name: {
        "weights": _FP8 | {"strategy": "tensor", "dynamic": False},
        "input_activations": _FP8 | {"strategy": "tensor", "dynamic": True},
        "format": _LAYOUT,
    },
    _ROWS.name: {
        "weights": _FP8 | {"strategy": "channel", "dynamic": False},
        "input_activations": _FP8 | {"strategy": "token", "dynamic": True},
        "format": _LAYOUT,
    },
    _BLOCKS.name: {
        "weights": _FP8 | {"strategy": "block", "block_structure": list(BLOCK_128X128.block), "dynamic": False},
        "input_activations": _FP8 | {"strategy": "group", "group_size": BLOCK_128X128.block[1], "dynamic": True},
        "format": _LAYOUT,
    },
    nvfp4.ENCODED.name: {
        "weights": _FP4 | _FP4_SCALES | {"dynamic": False},
        "input_activations": None,
        "format": "nvfp4-pack-quantized",
    },
}


def _configuration(contents: Contents) -> dict[str, Any] | str:
    groups: dict[str, list[str]] = {}
    for path, (recipe, n, k) in contents.stored.items():
        found = METHOD.format_of(recipe, n, k)
        if isinstance(found, str):
            return contents.misfit(path, found)
        groups.setdefault(found.name, []).append(path)
    everyone = [*contents.stored, *contents.plain]
    largest = max(groups, key=lambda name: len(groups[name]))  # its layers are those that nothing else names
    schemes = {
        f"group_{place}": {"targets": ["Linear"] if name == largest else _patterns(paths, everyone, contents)}
        | _SCHEMES[name]
        for place, (name, paths) in enumerate(groups.items())
    }
    layouts = {scheme["format"] for scheme in schemes.values()}
    return {
        "quant_method": METHOD.name,
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": schemes,
        "ignore": _patterns(contents.plain, everyone, contents),
    }


def _patterns(paths: Collection[str], everyone: Collection[str], contents: Contents) -> list[str]:
    """Names of these layers, and what is inside of them, and of no others: one for all of a kind, and without what begins
    the body's paths, which a body that is loaded alone does not have."""
    alike, mine = by_kind(everyone), set(paths)
    found = []
    for kind, some in by_kind(paths).items():
        whole = len(some) > 1 and len(some) == len(alike[kind])
        for name in [kind] if whole else some:
            found += _names(name, contents, {path for path in everyone if path not in mine}, some if whole else [name])
    return found


def _names(name: str, contents: Contents, others: Collection[str], paths: Collection[str]) -> list[str]:
    tail = contents.tail(name)
    if "." not in tail:
        return [tail]
    inner = re.escape(tail).replace(re.escape("*"), "[0-9]+")
    pattern = rf"(.*\.)?{inner}(\..*)?$"
    if any(re.match(pattern, other) for other in others):  # which ends alike
        return list(paths)
    return [f"re:{pattern}"]


def _said(configuration: Mapping[str, Any], path: str) -> CheckpointFormat | None:
    """The format of the group that has this layer as a target, by its name before its class."""
    groups = [one for one in (configuration.get("config_groups") or {}).values() if isinstance(one, Mapping)]
    named = [one for one in groups if any(_is_target(target, path) for target in one.get("targets") or ())]
    for group in named or [one for one in groups if "Linear" in (one.get("targets") or ())]:
        strategy = (group.get("weights") or {}).get("strategy")
        return next((one for one in METHOD.formats if _SCHEMES[one.name]["weights"]["strategy"] == strategy), None)
    return None


def _is_target(target: str, path: str) -> bool:
    return re.match(target[3:], path) is not None if target.startswith("re:") else target == path


METHOD = QuantMethod(
    "compressed-tensors",
    (_TENSOR, _ROWS, _BLOCKS, nvfp4.ENCODED),
    {
        "format": (None, _LAYOUT, "nvfp4-pack-quantized", "naive-quantized", "mixed-precision", "dense"),
        "transform_config.config_groups": (None, {}),
        "sparsity_config.format": (None, "dense"),
    },
    _configuration,
    _said,
)
