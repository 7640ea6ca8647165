"""NVFP4 in the two ways that checkpoints have it.

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
nearest, as `quantize_` computes it; what is written is a factor that becomes the same tensor_scale again, where there is
one, as of every weight that `quantize_` or compressed-tensors stored. Some of ModelOpt's factors are no fp32 number's
reciprocal: written for compressed-tensors, they come back as a neighbour. fp32 values differ from what the libraries'
own dequantization returns by the order of rounding alone: a quarter of compressed-tensors' by at most two units in the
last place, a tenth of ModelOpt's by one, whatever fp32 tensor_scale is chosen. Of a million values none differs in bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from te_inductor.api.checkpoint_formats.protocol import NVFP4, CheckpointFormat, Part, Parts, Shape, as_saved, scalar
from te_inductor.numerics import nvfp4
from te_inductor.recipes import Recipe
from te_inductor.recipes.formats import E4M3

CHUNK = 1 << 20  # values that are converted at a time


def _columns(values: int) -> Callable[[int, int], tuple[Shape, ...]]:
    """The shape of what has one element for so many values of a row."""
    return lambda n, k: ((n, k // values),) if k % 16 == 0 else ()


def _invertible(factor: Tensor) -> str | None:
    value = factor.float().item()
    smallest = torch.finfo(torch.float32).tiny
    if smallest <= value <= 1 / smallest:
        return None
    return f"found {value}, expected a factor whose reciprocal is a normal fp32 number"


def _repacked(packed: Tensor) -> Tensor:  # (N, K/2)
    """Puts bytes in the order of Note [Order of a stored block], some rows at a time, as they become words on the
    way."""
    stored = torch.empty_like(packed)
    rows = max(1, CHUNK // max(1, 2 * packed.shape[1]))
    for mine, theirs in zip(stored.split(rows), packed.split(rows), strict=True):
        mine.copy_(nvfp4.repack(theirs))
    return stored


def _decoded(parts: Parts, recipe: Recipe) -> Parts:
    packed, block_scale, tensor_scale = parts
    return _repacked(packed), block_scale, tensor_scale.float().reshape(())


def _encoded(parts: Parts, recipe: Recipe) -> Parts:
    packed, block_scale, factor = parts
    return _decoded((packed, block_scale, 1.0 / factor.float()), recipe)


def _with_factor(parts: Parts) -> Parts:
    packed, block_scale, tensor_scale = parts
    return packed, block_scale, factor_of(tensor_scale)


def factor_of(tensor_scale: Tensor) -> Tensor:  # (), fp32
    """The fp32 number whose reciprocal, to nearest, is this one; the nearest, where none is. Two roundings put it at
    most two units in the last place away from the rounded reciprocal."""
    nearest = (1.0 / tensor_scale.float()).reshape(1)
    steps = torch.tensor([0, -1, 1, -2, 2], dtype=torch.int32, device=nearest.device)
    near = (nearest.view(torch.int32) + steps).view(torch.float32)
    return near[((1.0 / near) == tensor_scale).int().argmax()]


_SCALE = Part("_scale", (E4M3.dtype,), _columns(16))
ENCODED = CheckpointFormat(
    "NVFP4 (compressed-tensors)",
    (
        Part("_packed", (torch.uint8,), _columns(2)),
        _SCALE,
        Part("_global_scale", (torch.float32,), scalar, _invertible),
    ),
    NVFP4,
    _encoded,
    _with_factor,
)
DECODED = CheckpointFormat(
    "NVFP4 (ModelOpt)",
    (Part("", (torch.uint8,), _columns(2)), _SCALE, Part("_scale_2", (torch.float32,), scalar)),
    NVFP4,
    _decoded,
    as_saved,
)
