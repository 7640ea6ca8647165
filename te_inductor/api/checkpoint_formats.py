"""Formats of published low-precision checkpoints, as data: which tensors stand for a weight, and what they are stored as.

A weight ``name`` of the model is one or several tensors of a checkpoint: ``name`` with a suffix each. Which format it
is in is found by these keys, their dtypes and their shapes; two layers of one checkpoint may have different formats.
A checkpoint's configuration, where there is one, is only asked for what its keys cannot show.

# Note [NVFP4 in checkpoints]
A value is ``e2m1 * block_scale * tensor_scale``. In all three places, ours included, a byte holds two values along K,
the first in its low nibble, and block scales are (N, K/16) in row order:

- compressed-tensors writes the encode factor, ``weight_global_scale = 448 * 6 / amax`` in fp32, by which it divides:
  ``e2m1 * (block_scale / weight_global_scale)``. Sources: compressors/nvfp4/helpers.py, quantization/lifecycle/
  forward_helpers.py and quantization/utils/helpers.py (generate_gparam) of compressed-tensors 0.20.
- ModelOpt writes the decode factor, ``weight_scale_2 = amax / (6 * 448)``: ``e2m1 * (block_scale * weight_scale_2)``.
  Source: modelopt/torch/quantization/qtensor/nvfp4_tensor.py of NVIDIA/Model-Optimizer, a2fbac7.
- Here it is ``(e2m1 * block_scale) * tensor_scale``, where the first product is exact. `quantize_` stores
  ``tensor_scale = 1 / fp32(448 * 6 / amax)``.

So e2m1 and block_scale stay bit for bit, and so does weight_scale_2. weight_global_scale becomes its reciprocal, to
nearest, as `quantize_` computes it. fp32 values differ from what the libraries' own dequantization returns by the order
of rounding alone: a quarter of compressed-tensors' by at most two units in the last place, a tenth of ModelOpt's by one,
whatever fp32 tensor_scale is chosen. Of a million values none differs in bf16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.numerics import nvfp4
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    NVFP4WeightOnly,
    QParams,
    Recipe,
)
from te_inductor.recipes.formats import BLOCK_128X128, E4M3

HIGH = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
CHUNK = 1 << 20  # values that are converted at a time
ROWS_OF_BLOCK = BLOCK_128X128.block[0]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """What a checkpoint says about a tensor without reading it."""

    dtype: torch.dtype | None  # None: one that torch has no name for, or no tensor
    shape: Shape
    called: str  # the dtype, as errors write it

    def __str__(self) -> str:
        return f"{self.called} {list(self.shape)}"


@dataclass(frozen=True)
class Part:
    """One of the tensors that stand for an (N, K) weight."""

    suffix: str  # its key is the weight's name and this
    dtypes: tuple[torch.dtype, ...]
    shapes: Callable[[int, int], tuple[Shape, ...]]  # those that it may have, of N and K
    check: Callable[[Tensor], str | None] | None = None  # of a scalar, which is read first: what is wrong with it

    def expected(self, n: int, k: int) -> str:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{names} {' or '.join(str(list(shape)) for shape in self.shapes(n, k)) or 'and K a multiple of 16'}"

    def fits(self, entry: TensorEntry, n: int, k: int) -> bool:
        return entry.dtype in self.dtypes and entry.shape in self.shapes(n, k)


@dataclass(frozen=True)
class CheckpointFormat:
    """How a kind of checkpoint writes one weight."""

    name: str
    parts: tuple[Part, ...]
    recipe: Recipe  # whose stored weights hold the same
    stored: Callable[[tuple[Tensor, ...], Recipe], tuple[Tensor, ...]]  # the stored weight's parts, of these

    def keys(self, name: str) -> tuple[str, ...]:
        """The checkpoint's keys of the weight of this name."""
        return tuple(name + part.suffix for part in self.parts)

    def misfits(self, name: str, entries: Mapping[str, TensorEntry], n: int, k: int) -> list[str]:
        """What is wrong with each of an (N, K) weight's keys; empty where it is in this format."""
        wrong = []
        for part, key in zip(self.parts, self.keys(name), strict=True):
            if key not in entries:
                wrong.append(f"{key}: found nothing, expected {part.expected(n, k)}")
            elif not part.fits(entries[key], n, k):
                wrong.append(f"{key}: found {entries[key]}, expected {part.expected(n, k)}")
        return wrong

    @staticmethod
    def rows(parts: tuple[Tensor, ...], n: int, first: int, count: int) -> tuple[Tensor, ...]:
        """Returns the parts' share of some rows of a weight of n rows; `first` and `count` are multiples of
        `ROWS_OF_BLOCK`."""
        some = []
        for part in parts:
            per = 1 if part.dim() and part.shape[0] == n else ROWS_OF_BLOCK
            some.append(part if part.numel() == 1 else part[first // per : -(-(first + count) // per)])
        return tuple(some)


def _whole(n: int, k: int) -> tuple[Shape, ...]:
    return ((n, k),)


def _scalar(n: int, k: int) -> tuple[Shape, ...]:
    return (), (1,), (1, 1)


def _rows(n: int, k: int) -> tuple[Shape, ...]:
    return (n, 1), (n,)


def _blocks(n: int, k: int) -> tuple[Shape, ...]:
    high, wide = BLOCK_128X128.block
    down, across = -(-n // high), -(-k // wide)
    return (down, across), (down, 1, across, 1)


def _packed(n: int, k: int) -> tuple[Shape, ...]:
    return ((n, k // 2),) if k % 16 == 0 else ()


def _sixteens(n: int, k: int) -> tuple[Shape, ...]:
    return ((n, k // 16),) if k % 16 == 0 else ()


def _invertible(factor: Tensor) -> str | None:
    value = factor.float().item()
    smallest = torch.finfo(torch.float32).tiny
    if smallest <= value <= 1 / smallest:
        return None
    return f"found {value}, expected a factor whose reciprocal is a normal fp32 number"


def _fp8(parts: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    data, scale = parts
    quantizer = recipe.slots().weight
    missing = quantizer.padded(data.shape[1]) - data.shape[1]
    padded = F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype) if missing else data
    return padded, scale.float().reshape(quantizer.granularity.scale_shape(*data.shape))


def _repacked(packed: Tensor) -> Tensor:  # (N, K/2)
    """Puts bytes in the order of Note [Order of a stored block], some rows at a time, as they become words on the
    way."""
    stored = torch.empty_like(packed)
    rows = max(1, CHUNK // max(1, 2 * packed.shape[1]))
    for mine, theirs in zip(stored.split(rows), packed.split(rows), strict=True):
        mine.copy_(nvfp4.repack(theirs))
    return stored


def _nvfp4(parts: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    packed, block_scale, tensor_scale = parts
    return _repacked(packed), block_scale, tensor_scale.float().reshape(())


def _nvfp4_encoded(parts: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    packed, block_scale, factor = parts
    return _nvfp4((packed, block_scale, 1.0 / factor.float()), recipe)


# Scales are as they were published, no powers of two, and so are activations': the recipes' own defaults would be.
TENSOR = Float8CurrentScaling()
ROWS = Float8RowwiseScaling(power_2_scale=False)
BLOCKS = Float8BlockScaling(fp8_quant_fwd_inp=QParams(), fp8_quant_fwd_weight=QParams())
NVFP4 = NVFP4WeightOnly()
RECIPES = (TENSOR, ROWS, BLOCKS, NVFP4)

_FP8 = Part("", (E4M3.dtype,), _whole)
_FP4_SCALE = Part("_scale", (E4M3.dtype,), _sixteens)
FORMATS = (
    CheckpointFormat("fine-grained FP8 (transformers)", (_FP8, Part("_scale_inv", _SCALES, _blocks)), BLOCKS, _fp8),
    CheckpointFormat(
        "FP8 with a scale a tensor (transformers)", (_FP8, Part("_scale_inv", _SCALES, _scalar)), TENSOR, _fp8
    ),
    *(
        CheckpointFormat(
            f"FP8 with a scale a {whose} (compressed-tensors, ModelOpt)",
            (_FP8, Part("_scale", _SCALES, shapes)),
            recipe,
            _fp8,
        )
        for whose, shapes, recipe in (("tensor", _scalar, TENSOR), ("channel", _rows, ROWS), ("block", _blocks, BLOCKS))
    ),
    CheckpointFormat(
        "NVFP4 (compressed-tensors)",
        (
            Part("_packed", (torch.uint8,), _packed),
            _FP4_SCALE,
            Part("_global_scale", (torch.float32,), _scalar, _invertible),
        ),
        NVFP4,
        _nvfp4_encoded,
    ),
    CheckpointFormat(
        "NVFP4 (ModelOpt)",
        (Part("", (torch.uint8,), _packed), _FP4_SCALE, Part("_scale_2", (torch.float32,), _scalar)),
        NVFP4,
        _nvfp4,
    ),
)

# Ends of keys that hold what activations or a cache of keys and values were calibrated to. Recipes of stored weights
# scale activations by themselves, or leave them as they are.
CALIBRATED = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)

# Ends of keys of formats that are no others' companions, and why a weight with them is not what it would be taken for.
FOREIGN = {
    "pre_quant_scale": "activations would have to be multiplied by it (AWQ, SVDQuant)",
    "svdquant_lora_a": "it is one of two factors of a low-rank part (SVDQuant)",
    "svdquant_lora_b": "it is one of two factors of a low-rank part (SVDQuant)",
    "weight_zero_point": "weights that are not symmetric cannot be stored",
    "weight_g_idx": "groups in another order cannot be stored",
    "weight_shape": "integer weights (pack-quantized) cannot be stored",
    "qweight": "integer weights (GPTQ, AWQ) cannot be stored",
}

# What a configuration may say, field by field: what keys do not show. A field that is missing is None.
_LAYOUTS = (None, "float-quantized", "nvfp4-pack-quantized", "naive-quantized", "mixed-precision", "dense")
_ALGORITHMS = (
    *(None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "fp8_pb_wo", "fp8_pb_real"),
    *("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION"),
)
OWN = "te_inductor"  # its `recipes` are names, as `load_quantized` takes them
CONFIGURATIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"weight_block_size": (None, [128, 128]), "fmt": (None, "e4m3")},
    "compressed-tensors": {
        "format": _LAYOUTS,
        "transform_config.config_groups": (None, {}),
        "sparsity_config.format": (None, "dense"),
    },
    "modelopt": {"quant_algo": _ALGORITHMS},
    OWN: {},
}


def unsupported(configuration: Mapping[str, Any]) -> list[str]:
    """What a checkpoint's quantization_config asks for and is not had here."""
    method = configuration.get("quant_method")
    if method is None:
        return []
    if method not in CONFIGURATIONS:
        known = ", ".join(CONFIGURATIONS)
        return [f"quantization_config.quant_method: found {method!r}, expected one of {known}"]
    wrong = []
    for field, allowed in CONFIGURATIONS[method].items():
        found: Any = configuration
        for name in field.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found not in allowed:
            listed = ", ".join(repr(one) for one in allowed if one is not None)
            wrong.append(f"quantization_config.{field}: found {found!r}, expected {listed}, or nothing")
    return wrong
