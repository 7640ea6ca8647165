"""What the casts of layers of one input move and launch beyond what the layers do in bf16.

# Note [Bytes of casts]
An operand of two GEMMs has two copies in FP8, a byte an element each: x a row copy for fprop and a column copy for
wgrad, the weight for fprop and dgrad, the gradient of the output for dgrad and wgrad. What a copy costs depends on what
makes the tensor (docs/ledger/training_step.md has the sums for a Llama layer):

- a tensor that lies in memory, as attention's output and a weight do, is read for it: 2 bytes;
- a kernel that Inductor generates, as of a norm or an activation, writes the copy itself. Where no one else reads the
  tensor, the copy takes the place of 2 bytes in bf16;
- the column copy of x is made in the backward, where x is read once more.

Before it is cast with a scale of its own, a tensor is read for its amax: 2 bytes, or about 3 where it is computed once
more instead (SwiGLU reads gate and up, its backward a third tensor). Delayed scaling knows the scale and records the
amax in the kernel that casts, which then took up to 1.27 times as long (H200, run D1): a byte more of 4. Scales of rows
want an amax for each copy. Scales of blocks are found in the tile that is cast.

A weight's copies are made in each call, unless the options say `weights="once"`: then one kernel reads a weight and
makes both, and a weight that has not changed is only read. A weight that arrives in FP8 is transposed for dgrad."""

from dataclasses import dataclass
from typing import Literal

# What makes a tensor: a kernel that Inductor generates, for low-precision GEMMs alone; such a kernel, and others read
# it in bf16; something else, and it lies in memory.
Maker = Literal["kernel", "shared kernel", "memory"]
Scales = Literal["known", "tensor", "rows", "blocks"]
Weights = Literal["each_call", "once", "gathered"]

_READ = 2
_AMAX: dict[Scales, int] = {"known": 0, "tensor": 1, "rows": 2, "blocks": 0}  # amaxes of a tensor that has two copies
_COMPUTED_AGAIN = 3
_RECORDED = 1


@dataclass(frozen=True)
class Layer:
    """One layer, behind the input that it shares."""

    n: int
    gradient: Maker  # of its output


@dataclass(frozen=True)
class Layers:
    """Layers of one input and recipe."""

    m: int
    k: int
    layers: tuple[Layer, ...]
    x: Maker
    scales: Scales
    dgrad: bool = True
    wgrad: bool = True
    weights: Weights = "each_call"

    @property
    def n(self) -> int:
        """The N of all of them."""
        return sum(layer.n for layer in self.layers)

    @property
    def gemms(self) -> int:
        """The GEMMs of each layer."""
        return 1 + self.dgrad + self.wgrad

    @property
    def flops(self) -> int:
        return 2 * self.gemms * self.m * self.n * self.k


@dataclass(frozen=True)
class Casts:
    """What the casts of some layers add to them."""

    bytes: int
    launches: int  # of kernels that cast, less those of GEMMs that are merged


def casts_of(layers: Layers) -> Casts:
    """The casts of a call, with its backward. Layers of one input are one GEMM (merging.py)."""
    parts = _input(layers), _weights(layers), _gradients(layers)
    merged = layers.gemms * (len(layers.layers) - 1)
    return Casts(sum(moved for moved, _ in parts), sum(launches for _, launches in parts) - merged)


def _input(layers: Layers) -> tuple[int, int]:
    moved, launches = _copies(layers.x, 1), int(layers.x == "memory")
    if layers.wgrad:
        moved, launches = moved + _READ + 1, launches + 1
    scales, more = _scales(layers, layers.x, 1 + layers.wgrad)
    return layers.m * layers.k * (moved + scales), launches + more


def _gradients(layers: Layers) -> tuple[int, int]:
    """The casts of the outputs' gradients, which have scales together."""
    copies, moved, launches = layers.dgrad + layers.wgrad, 0, 0
    if not copies:
        return 0, 0
    for layer in layers.layers:
        scales, more = _scales(layers, layer.gradient, copies)
        moved += layers.m * layer.n * (_copies(layer.gradient, copies) + scales)
        launches += layer.gradient == "memory"
    return moved, launches + more


def _weights(layers: Layers) -> tuple[int, int]:
    elements, count, copies = layers.n * layers.k, len(layers.layers), 1 + layers.dgrad
    scales, launches = _scales(layers, "memory", copies)
    if layers.weights == "gathered":
        return (_READ * elements, count) if layers.dgrad else (0, 0)
    if layers.weights == "once":
        # In inference none has changed. In training all have: a step of one microbatch.
        return elements * (_READ + copies + scales if layers.dgrad else _READ), count
    return elements * (copies * (_READ + 1) + scales), count * (copies + launches)


def _copies(maker: Maker, copies: int) -> int:
    """Bytes an element of copies that are made at once."""
    return copies + {"kernel": -_READ, "shared kernel": 0, "memory": _READ}[maker]


def _scales(layers: Layers, maker: Maker, copies: int) -> tuple[int, int]:
    """Bytes an element, and kernels, that finding scales takes: of a tensor's amax a second stage of few numbers, of
    rows' one kernel for each copy."""
    if layers.scales == "known":
        return (_RECORDED if layers.gemms > 1 else 0), 0
    amaxes = min(_AMAX[layers.scales], copies)
    return amaxes * (_READ if maker == "memory" else _COMPUTED_AGAIN), 2 if amaxes else 0
