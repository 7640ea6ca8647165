"""What a format of checkpoints is: the tensors that stand for a weight, what they are stored as, and the way back; and
what a program is that has a configuration for its formats.

A format that is only read has no `written`; a program that is only read has no `configuration`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
ROWS_OF_BLOCK = BLOCK_128X128.block[0]

# Scales are as they were published, no powers of two, and so are activations': the recipes' own defaults would be.
TENSOR = Float8CurrentScaling()
ROWS = Float8RowwiseScaling(power_2_scale=False)
BLOCKS = Float8BlockScaling(fp8_quant_fwd_inp=QParams(), fp8_quant_fwd_weight=QParams())
NVFP4 = NVFP4WeightOnly()

Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]


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
    shapes: Callable[[int, int], tuple[Shape, ...]]  # those that it may have, of N and K; it is written in the first
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
    stored: Callable[[Parts, Recipe], Parts]  # the stored weight's parts, of these
    written: Callable[[Parts], Parts]  # these, of the parts of a stored weight as they are saved

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

    def refusal(self, recipe: Recipe, n: int, k: int) -> str | None:
        """What is expected of a weight (N, K) in place of this recipe, which cannot be written so; None if it can."""
        if type(recipe) is not type(self.recipe):
            return self.recipe.name
        if (wrong := other_values(recipe, self.recipe)) is not None:
            return wrong
        if not all(part.shapes(n, k) for part in self.parts):
            return "K as a multiple of 16"
        return None

    def tensors(self, name: str, parts: Parts, n: int, k: int) -> dict[str, Tensor]:
        """The tensors of a weight (N, K), by their keys, of its parts as they are saved. Each has memory of its own, as
        safetensors wants it."""
        found = {}
        for part, key, tensor in zip(self.parts, self.keys(name), self.written(parts), strict=True):
            shape = part.shapes(n, k)[0]
            tensor = tensor[:, : shape[1]] if len(shape) == tensor.dim() == 2 else tensor  # K was padded
            alone = tensor.detach().reshape(shape).contiguous()
            found[key] = alone.clone() if alone.untyped_storage().nbytes() > alone.nbytes else alone
        return found

    @staticmethod
    def rows(parts: Parts, n: int, first: int, count: int) -> Parts:
        """Returns the parts' share of some rows of a weight of n rows; `first` and `count` are multiples of
        `ROWS_OF_BLOCK`."""
        some = []
        for part in parts:
            per = 1 if part.dim() and part.shape[0] == n else ROWS_OF_BLOCK
            some.append(part if part.numel() == 1 else part[first // per : -(-(first + count) // per)])
        return tuple(some)


def other_values(recipe: Recipe, default: Recipe) -> str | None:
    """Says where a recipe of the same class stores other elements or scopes than checkpoints have."""
    if isinstance(recipe, NVFP4WeightOnly):
        return None
    found, expected = ((one.slots().weight.element, one.slots().weight.scope) for one in (recipe, default))
    return None if found == expected else f"weights as {expected}, not {found}"


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to hold: the linear layers whose weights are stored, by module path, and the modules that
    multiply in high precision."""

    stored: Mapping[str, tuple[Recipe, int, int]]  # the recipe, N and K
    plain: Sequence[str]
    body: str = ""  # what begins the paths of a model's body, which may be loaded without its head: "model"

    def tail(self, path: str) -> str:
        """The path in the body alone."""
        return path.removeprefix(f"{self.body}.") if self.body else path

    def misfit(self, path: str, expected: str) -> str:
        """A line for what keeps a layer from being written."""
        recipe, n, k = self.stored[path]
        return f"{path}: found {recipe.name} {n} x {k}, expected {expected}"


@dataclass(frozen=True)
class QuantMethod:
    """A `quant_method`: the formats that its checkpoints have, and its configuration."""

    name: str
    formats: tuple[CheckpointFormat, ...]
    # What its configuration may say, field by field: what keys do not show. A field that is missing is None.
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # What says that these layers are stored so: a configuration, or why there is none.
    configuration: Callable[[Contents], "dict[str, Any] | str"] | None = None
    # The format that a configuration says of a layer, by its path, where its keys fit several; None: it does not.
    said: Callable[[Mapping[str, Any], str], CheckpointFormat | None] | None = None

    def format_of(self, recipe: Recipe, n: int, k: int) -> "CheckpointFormat | str":
        """The format that a weight (N, K) of this recipe is written in, or what is expected in its place."""
        expected = {type(one.recipe) is type(recipe): one.refusal(recipe, n, k) for one in self.formats}
        for one in self.formats:
            if one.refusal(recipe, n, k) is None:
                return one
        return expected.get(True) or " or ".join(dict.fromkeys(one.recipe.name for one in self.formats))

    def unsupported(self, configuration: Mapping[str, Any]) -> list[str]:
        """What a configuration of this program asks for and is not had here."""
        wrong = []
        for name, allowed in self.fields.items():
            found: Any = configuration
            for part in name.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found not in allowed:
                listed = ", ".join(repr(one) for one in allowed if one is not None)
                wrong.append(f"quantization_config.{name}: found {found!r}, expected {listed}, or nothing")
        return wrong


# ---- shapes of parts, of N and K


def whole(n: int, k: int) -> tuple[Shape, ...]:
    return ((n, k),)


def scalar(n: int, k: int) -> tuple[Shape, ...]:
    return (1,), (), (1, 1)


def rows(n: int, k: int) -> tuple[Shape, ...]:
    return (n, 1), (n,)


def blocks(n: int, k: int) -> tuple[Shape, ...]:
    high, wide = BLOCK_128X128.block
    down, across = -(-n // high), -(-k // wide)
    return (down, across), (down, 1, across, 1)


# ---- FP8, which all programs have alike


def stored_fp8(parts: Parts, recipe: Recipe) -> Parts:
    data, scale = parts
    quantizer = recipe.slots().weight
    missing = quantizer.padded(data.shape[1]) - data.shape[1]
    padded = F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype) if missing else data
    return padded, scale.float().reshape(quantizer.granularity.scale_shape(*data.shape))


def as_saved(parts: Parts) -> Parts:
    return parts


def fp8(name: str, suffix: str, shapes: Callable[[int, int], tuple[Shape, ...]], recipe: Recipe) -> CheckpointFormat:
    """A format of E4M3 values and scales."""
    parts = (Part("", (E4M3.dtype,), whole), Part(suffix, SCALES, shapes))
    return CheckpointFormat(name, parts, recipe, stored_fp8, as_saved)
