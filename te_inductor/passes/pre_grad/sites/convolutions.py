"""Convolutions. One of a single element, whose kernel and stride are 1, without padding and groups, is a linear layer over
the channels: where these are last in memory, as `torch.channels_last` has them, views alone are between the two.
Elsewhere the channels would have to be copied there and back, which costs more than low precision saves. No recipe is
for any other convolution: the report names it and counts its FLOPs, and that it runs as it is is no fallback."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.diagnostics import Outside, Refusal
from te_inductor.passes.graph.operators import arguments, name
from te_inductor.passes.graph.values import is_tensor, value

Sizes = tuple[Any, Any, Any]  # M, N, K

LAYERS = tuple(
    op for n in (1, 2, 3) for op in (getattr(torch, f"conv{n}d"), getattr(torch.ops.aten, f"conv{n}d").default)
)
_OPERANDS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
# The names of those that are read, with those of their operands: "convolution" is what graphs of forward and backward have.
NAMES = {
    **{f"conv{dims}d": _OPERANDS for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _TRANSPOSED for dims in (1, 2, 3)},
    "convolution": (*_OPERANDS[:6], "transposed", "output_padding", "groups"),
    "conv_tbc": ("input", "weight", "bias", "pad"),
}
LAYOUT = Refusal(
    "a convolution of one element whose channels are not last in memory: call"
    " model.to(memory_format=torch.channels_last), and the same of its input"
)
OUTSIDE = Outside("no recipe is for a convolution of several elements, or with a stride, padding or groups")


def operands(node: fx.Node) -> dict[str, Any]:
    """The operands of a convolution, by name."""
    return arguments(node, *NAMES[name(node)])


def is_of_one_element(node: fx.Node) -> bool:
    """Whether it is one that is a linear layer, however its channels lie."""
    given = operands(node)
    x, weight = given.get("input"), given.get("weight")
    if node.target not in LAYERS or not (is_tensor(x) and is_tensor(weight)):
        return False
    plain = (("stride", 1), ("padding", 0), ("groups", 1))
    is_plain = all(_is_all(given.get(option, wanted), wanted) for option, wanted in plain)
    return is_plain and value(x).dim() == value(weight).dim() and all(size == 1 for size in value(weight).shape[2:])


def _is_all(given: Any, wanted: int) -> bool:
    if isinstance(given, str):  # of padding, which is nothing around one element
        return True
    return all(one == wanted for one in given) if isinstance(given, list | tuple) else given == wanted


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor (B, C, ...) lies in memory as (B, ..., C)."""
    expected: Any = 1
    for dim in (1, *reversed(range(2, tensor.dim())), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not (statically_known_true(size == 1) or statically_known_true(stride == expected)):
            return False
        expected = expected * size
    return True


def is_layer(node: fx.Node) -> bool:
    """Whether it is a linear layer between views."""
    return is_of_one_element(node) and all(map(has_channels_last, (value(operands(node)["input"]), value(node))))


def refusal(node: fx.Node) -> Refusal | None:
    """Why a convolution is no linear layer."""
    if not is_of_one_element(node):
        return OUTSIDE
    return None if is_layer(node) else LAYOUT


def sizes(node: fx.Node) -> Sizes:
    """M, N and K of the products that a convolution is: M counts the output's elements, or a transposed one's input's."""
    given = operands(node)
    x, weight, y = value(given["input"]), value(given["weight"]), value(node)
    if name(node) == "conv_tbc":  # of a weight (kernel, K, N) and channels that are last
        return math.prod(y.shape[:2]), weight.shape[2], weight.shape[0] * weight.shape[1]
    transposed = given.get("transposed", "transpose" in name(node))
    return sizes_of(x.shape, weight.shape, y.shape, transposed, given.get("groups", 1))


def sizes_of(x: Sequence[Any], weight: Sequence[Any], y: Sequence[Any], transposed: bool, groups: int) -> Sizes:
    """The same, of the shapes of its tensors."""
    kernel: Any = math.prod(weight[2:])
    if transposed:
        return math.prod(x) // weight[0], weight[1] * groups * kernel, weight[0] // groups
    n = weight[0]
    return math.prod(y) // n, n, weight[1] * kernel
