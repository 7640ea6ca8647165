"""Experts that a checkpoint has one by one, and a model in one parameter (E, N, K): how their matrices are put together.

An expert's matrix may be several of a checkpoint, one above the other. The elements stay as they are; so do the scales,
if one stored matrix can have all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_inductor.api.checkpoint_files import Checkpoint
from te_inductor.api.checkpoint_formats.protocol import BLOCKS, NVFP4, ROWS, ROWS_OF_BLOCK, Parts
from te_inductor.ops import stored_experts
from te_inductor.ops.permutations import cat_bytes
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    NVFP4WeightOnly,
    Recipe,
)

# Names of the parameters in transformers' classes, and of the linear layers in checkpoints. Source: transformers,
# conversion_mapping.py.
PARTS_OF = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

Apart = Callable[[Sequence[int], Sequence[tuple[str, ...]], Checkpoint], str | None]


@dataclass(frozen=True)
class Fusing:
    """How stored matrices of one recipe become one, (N, K), of those above each other."""

    recipe: Recipe  # whose stored weights hold it
    apart: Apart  # of each matrix' rows and keys: why they cannot
    join: Callable[[Sequence[Parts]], Parts]


def _never(rows: Sequence[int], keys: Sequence[tuple[str, ...]], checkpoint: Checkpoint) -> str | None:
    return None


def _edges(rows: Sequence[int], keys: Sequence[tuple[str, ...]], checkpoint: Checkpoint) -> str | None:
    if all(count % ROWS_OF_BLOCK == 0 for count in rows[:-1]):
        return None
    return (
        f"{keys[0][0]}: found {rows[0]} rows, expected a multiple of {ROWS_OF_BLOCK}: the blocks of the matrix below it,"
        " in the same parameter, would begin inside one"
    )


def _factors(rows: Sequence[int], keys: Sequence[tuple[str, ...]], checkpoint: Checkpoint) -> str | None:
    first = checkpoint.read(keys[0][-1]).reshape(())
    for key in (of[-1] for of in keys[1:]):
        other = checkpoint.read(key).reshape(())
        if not torch.equal(first, other):
            return f"{key}: found {other.item()}, expected {first.item()}, as {keys[0][-1]}, of one expert's matrix"
    return None


def _scaled(matrices: Sequence[Parts]) -> Parts:
    """FP8 with scales of rows or blocks; a scale of a matrix is that of each of its rows."""
    scales = [scale if scale.dim() else scale.expand(data.shape[0], 1) for data, scale in matrices]
    return cat_bytes([data for data, _ in matrices]), torch.cat(scales)


def _two_level(matrices: Sequence[Parts]) -> Parts:
    return *(cat_bytes([parts[i] for parts in matrices]) for i in range(2)), matrices[0][2]


FUSINGS = {
    Float8CurrentScaling: Fusing(ROWS, _never, _scaled),
    Float8RowwiseScaling: Fusing(ROWS, _never, _scaled),
    Float8BlockScaling: Fusing(BLOCKS, _edges, _scaled),
    NVFP4WeightOnly: Fusing(NVFP4, _factors, _two_level),
}


class Filling:
    """A stored parameter of experts, (E, N, K), that is filled one expert after the other."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, recipe: Recipe) -> None:
        self._shape, self._dtype, self._recipe = shape, dtype, recipe
        self._kind = stored_experts.kind_of(recipe)
        self._parts: Parts = ()

    def put(self, expert: int, parts: Parts) -> None:
        """The parts of its matrix."""
        found = tuple(self._kind.squeezed(part) for part in parts)
        self._parts = self._parts or tuple(part.new_empty((self._shape[0], *part.shape)) for part in found)
        for whole, part in zip(self._parts, found, strict=True):
            whole[expert].copy_(part)

    def made(self) -> Tensor:
        return self._kind.of(self._parts, self._shape, self._dtype, self._recipe, False)
