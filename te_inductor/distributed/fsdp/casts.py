"""The passes over a rank's rows of weights: the cast of those that FSDP gathers at once, and the amaxes of blocks.

Plain torch, which Inductor compiles on GPUs: one read of the rows and one write of their bytes."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.compat.fsdp import ShardedParameter
from te_inductor.diagnostics import say
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import dense

COMPILED_ON = ["cuda"]  # types of devices
# Inductor would cast an fp32 shard straight to FP8: a gather in bf16 rounds it to that before.
EXACT: dict[str, Any] = {"emulate_precision_casts": True}


def cast_rows(weights: Sequence[tuple[ShardedParameter, Quantizer, Tensor]]) -> list[Tensor]:
    """Bytes of each, (rows, K), cast from the dtype in which FSDP would gather it: with the scale of the weight, or
    those of its blocks."""
    rows, scales, constants = [], [], []
    for shard, quantizer, scale in weights:
        scope = quantizer.granularity
        rows.append(shard.data)
        scales.append(scale.view(scope.blocks(*shard.shape)) if scope.blocked else scale)
        constants.append((shard.first_row, shard.dtype, scope.block, quantizer.format.max, quantizer.format.dtype))
    return _run(_casts, rows, scales, constants)


def block_amaxes(shards: Sequence[ShardedParameter], quantizer: Quantizer) -> list[Tensor]:
    """Returns, for each weight, the largest magnitudes of all of its blocks, (blocks down, blocks across) fp32, as far
    as they are this rank's; zeros where they are others'."""
    scope = quantizer.granularity
    constants = [(shard.first_row, shard.dtype, scope.block, scope.blocks(*shard.shape)) for shard in shards]
    return _run(_block_amaxes, [shard.data for shard in shards], constants)


def _casts(rows: list[Tensor], scales: list[Tensor], constants: list[Any]) -> list[Tensor]:
    return [_cast(*one) for one in zip(rows, scales, constants, strict=True)]


def _cast(data: Tensor, scale: Tensor, constants: Any) -> Tensor:
    first, dtype, (high, wide), limit, element = constants
    if scale.dim():
        down = (torch.arange(data.shape[0], device=data.device) + first) // high
        down = down.clamp(max=scale.shape[0] - 1)  # behind the last row are zeros
        scale = scale[down].repeat_interleave(wide, 1)[:, : data.shape[1]]
    return dense.saturate(data.to(dtype), scale, limit, element).view(torch.uint8)


def _block_amaxes(rows: list[Tensor], constants: list[Any]) -> list[Tensor]:
    return [_amaxes(*one) for one in zip(rows, constants, strict=True)]


def _amaxes(data: Tensor, constants: Any) -> Tensor:
    first, dtype, (high, wide), (down, across) = constants
    above = first % high
    padded = F.pad(data.to(dtype).abs(), (0, 0, above, -(above + data.shape[0]) % high))
    own = padded.view(-1, high, across, wide).amax((1, 3)).float()
    before = first // high
    whole = F.pad(own, (0, 0, before, max(down - before - own.shape[0], 0)))
    return whole[:down]


_failed: set[Callable[..., Any]] = set()


def _run(function: Callable[..., list[Tensor]], rows: list[Tensor], *more: Any) -> list[Tensor]:
    """Runs a function as Inductor compiles it, where that is worth its time; as it stands where that fails."""
    if rows[0].device.type in COMPILED_ON and function not in _failed:
        try:
            return _compiled(function)(rows, *more)  # type: ignore[no-any-return]
        except Exception:
            _failed.add(function)
            failure = traceback.format_exc(limit=-3)
            say(f"te_inductor: shards are cast by plain torch, because their kernel failed:\n{failure}", "warn")
    return function(rows, *more)


@functools.cache
def _compiled(function: Callable[..., list[Tensor]]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, options=EXACT)
