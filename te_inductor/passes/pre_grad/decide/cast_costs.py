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

A backward by another recipe shares no cast with fprop: x and the weight are read again for it, and so is the gradient
where dgrad and wgrad have a recipe each.

A weight's copies are made in each call, unless the options say `weights="once"`: then one kernel reads a weight and
makes both, and a weight that has not changed is only read. A weight that arrives in FP8 is transposed for dgrad."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.aliases import is_opaque, memory
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.walks import back_past
from te_inductor.passes.pre_grad.sites.rule import Match

# What makes a tensor: a kernel that Inductor generates, for low-precision GEMMs alone; such a kernel, and others read
# it in bf16; something else, and it lies in memory.
# "loss": of the gradient of logits, which is read and written in bf16 too, and whose scale is known.
Maker = Literal["kernel", "shared kernel", "memory", "loss"]
Scales = Literal["known", "tensor", "rows", "blocks"]
Weights = Literal["each_call", "once", "gathered"]

_READ = 2
_AMAX: dict[Scales, int] = {"known": 0, "tensor": 1, "rows": 2, "blocks": 0}  # amaxes of a tensor that has two copies
_COMPUTED_AGAIN = 3
_RECORDED = 1
# Bytes an element that the kernel of a loss's gradient takes the time of, beyond what is moved in bf16 too: 445 us for
# 1024 x 128256 where memory takes 175 (H100, 2026-11-27).
_LOSS = 5


@dataclass(frozen=True)
class Layer:
    """One layer, behind the input that it shares."""

    n: int
    gradient: Maker  # of its output


@dataclass(frozen=True)
class BackwardGemm:
    """What dgrad or wgrad multiplies."""

    scales: Scales | None = None  # of another recipe, which casts it; None: those of the layers
    high: bool = False  # whether it is not cast
    dequantized: bool = False  # whether it is then what fprop's copies stand for


@dataclass(frozen=True)
class Layers:
    """Layers of one input and recipe."""

    m: int
    k: int
    layers: tuple[Layer, ...]
    x: Maker
    scales: Scales
    dgrad: BackwardGemm | None = BackwardGemm()
    wgrad: BackwardGemm | None = BackwardGemm()
    weights: Weights = "each_call"

    @property
    def n(self) -> int:
        """The N of all of them."""
        return sum(layer.n for layer in self.layers)

    @property
    def low(self) -> tuple[BackwardGemm | None, BackwardGemm | None]:
        """dgrad and wgrad, where they are in low precision."""
        dgrad, wgrad = (None if one is None or one.high else one for one in (self.dgrad, self.wgrad))
        return dgrad, wgrad

    @property
    def each(self) -> tuple[Scales, ...]:
        """The scales of each GEMM in low precision, fprop's first."""
        return self.scales, *(one.scales or self.scales for one in self.low if one)

    @property
    def gemms(self) -> int:
        """The GEMMs of each layer in low precision."""
        return len(self.each)

    @property
    def high(self) -> int:
        """The GEMMs of each layer in high precision."""
        return sum(one is not None and one.high for one in (self.dgrad, self.wgrad))

    @property
    def flops(self) -> int:
        """The FLOPs of one GEMM."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Casts:
    """What the casts of some layers add to them."""

    bytes: int
    launches: int  # of kernels that cast, less those of GEMMs that are merged


def casts_of(layers: Layers) -> Casts:
    """The casts of a call, with its backward. Layers of one input are one GEMM (merging.py)."""
    parts = _input(layers), _weights(layers), _gradients(layers), _values(layers)
    merged = layers.gemms * (len(layers.layers) - 1)
    return Casts(sum(moved for moved, _ in parts), sum(launches for _, launches in parts) - merged)


def _input(layers: Layers) -> tuple[int, int]:
    moved, launches = _copies(layers.x, 1), int(layers.x == "memory")
    _, wgrad = layers.low
    if wgrad:
        moved, launches = moved + _READ + 1, launches + 1
    shared = wgrad is not None and wgrad.scales is None
    scales, more = _scales(layers, layers.scales, layers.x, 1 + shared)
    if wgrad and wgrad.scales:
        scales, more = _added((scales, more), _scales(layers, wgrad.scales, "memory", 1))
    return layers.m * layers.k * (moved + scales), launches + more


def _values(layers: Layers) -> tuple[int, int]:
    """The copies that a backward in high precision writes out."""
    of_weights, of_x = (one is not None and one.dequantized for one in (layers.dgrad, layers.wgrad))
    elements = of_weights * layers.n * layers.k + of_x * layers.m * layers.k
    return (1 + _READ) * elements, of_weights * len(layers.layers) + of_x


def _gradients(layers: Layers) -> tuple[int, int]:
    """The casts of the outputs' gradients, which have scales together."""
    found = (0, 0)
    for place, (scales, copies) in enumerate(_casts_of_gradients(layers)):
        moved, launches = 0, 0
        for layer in layers.layers:
            maker: Maker = layer.gradient if place == 0 or layer.gradient == "loss" else "memory"
            of_scales, more = (0, 0) if maker == "loss" else _scales(layers, scales, maker, copies)
            moved += layers.m * layer.n * (_copies(maker, copies) + of_scales)
            launches += maker == "memory"
        found = _added(found, (moved, launches + more))
    return found


def _casts_of_gradients(layers: Layers) -> list[tuple[Scales, int]]:
    """The scales of each cast of a gradient, and how many copies it makes."""
    low = [one.scales for one in layers.low if one]
    return [(other or layers.scales, low.count(other)) for other in dict.fromkeys(low)]


def _weights(layers: Layers) -> tuple[int, int]:
    elements, count, (dgrad, _) = layers.n * layers.k, len(layers.layers), layers.low
    if layers.weights == "gathered":
        return (_READ * elements, count) if dgrad else (0, 0)
    shared = dgrad is not None and dgrad.scales is None
    moved, launches = _of_weights(layers, layers.scales, 1 + shared)
    if dgrad and dgrad.scales:
        moved, launches = _added((moved, launches), _of_weights(layers, dgrad.scales, 1))
    return elements * moved, count * launches


def _of_weights(layers: Layers, scales: Scales, copies: int) -> tuple[int, int]:
    """Bytes an element, and kernels, of the copies of a weight that one recipe casts."""
    moved, launches = _scales(layers, scales, "memory", copies)
    if layers.weights == "once":
        # In inference none has changed. In training all have: a step of one microbatch.
        return (_READ + copies + moved if layers.low[0] else _READ), 1
    return copies * (_READ + 1) + moved, copies + launches


def _copies(maker: Maker, copies: int) -> int:
    """Bytes an element of copies that are made at once."""
    return copies + {"kernel": -_READ, "shared kernel": 0, "memory": _READ, "loss": _LOSS - copies}[maker]


def _scales(layers: Layers, scales: Scales, maker: Maker, copies: int) -> tuple[int, int]:
    """Bytes an element, and kernels, that finding scales takes: of a tensor's amax a second stage of few numbers, of
    rows' one kernel for each copy."""
    if scales == "known":
        return (_RECORDED if layers.gemms > 1 else 0), 0
    amaxes = min(_AMAX[scales], copies)
    return amaxes * (_READ if maker == "memory" else _COMPUTED_AGAIN), 2 if amaxes else 0


def _added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


class Makers:
    """The makers of the tensors of a graph, whose matrix products are known."""

    def __init__(self, products: AbstractSet[fx.Node], low: AbstractSet[fx.Node]) -> None:
        self.products, self.low = products, low

    def of_input(self, match: Match) -> Maker:
        """What makes x."""
        node = back_past(match.x, is_view)
        if node.op in ("placeholder", "get_attr") or self._is_foreign(node):
            return "memory"
        return "kernel" if all(user in self.low for user in _readers(node)) else "shared kernel"

    def of_gradient(self, match: Match) -> Maker:
        """What makes the gradient of the output."""
        readers = list(_readers(match.end))
        if not readers or any(reader.op == "output" for reader in readers):
            return "memory"
        if all(self._is_foreign(reader) for reader in readers):
            return "memory"
        return "shared kernel" if len(readers) == 1 and _is_residual(readers[0]) else "kernel"

    def _is_foreign(self, node: fx.Node) -> bool:
        """Whether no code that Inductor generates computes it, or its gradients."""
        called = name(node)
        return node in self.products or is_opaque(node) or "attention" in called or "attn" in called


def is_view(node: fx.Node) -> bool:
    """Whether it computes nothing: shares its operand's memory, or moves that at most."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    called, kind, in_place = operators.read(node)
    if in_place:
        return False
    moves = kind in Kind.RESHAPE | Kind.CAST | Kind.COPY or called == "getitem"
    return moves or bool(memory(node) & memory(node.all_input_nodes[0]))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a tensor, or a view of it; without what only asks for its sizes."""
    for user in node.users:
        if user.op == "output":
            yield user
        elif is_view(user):
            yield from _readers(user)
        elif any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(user.meta.get("example_value"))):
            yield user


def _is_residual(node: fx.Node) -> bool:
    """Whether it adds two tensors that have gradients, which both then read the sum's."""
    operands = [one for one in node.all_input_nodes if is_tensor(one)]
    return (
        operators.read(node).name == "add"
        and len(operands) == 2
        and value(operands[0]).shape == value(operands[1]).shape
        and all(value(one).requires_grad for one in operands)
    )
