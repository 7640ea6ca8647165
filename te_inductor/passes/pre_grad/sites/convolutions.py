"""Convolutions. No recipe is for them: the report names each and counts its FLOPs, and that it runs as it is is no
fallback."""

import math
from typing import Any

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import value

_OPERANDS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
# The names of those that are read, with those of their operands: "convolution" is what graphs of forward and backward have.
NAMES = {
    **{f"conv{dims}d": _OPERANDS for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _TRANSPOSED for dims in (1, 2, 3)},
    "convolution": (*_OPERANDS[:6], "transposed", "output_padding", "groups"),
}
OUTSIDE = Refusal("no recipe is for a convolution of several elements, or with a stride, padding or groups")


def operands(node: fx.Node) -> dict[str, Any]:
    """The operands of a convolution, by name."""
    return dict(zip(NAMES[name(node)], node.args, strict=False)) | node.kwargs


def refusal(node: fx.Node) -> Refusal:
    """Why a convolution is no linear layer."""
    return OUTSIDE


def sizes(node: fx.Node) -> tuple[Any, Any, Any]:
    """M, N and K of the products that a convolution is: M counts the output's elements, or a transposed one's input's."""
    given = operands(node)
    x, weight, y = value(given["input"]), value(given["weight"]), value(node)
    kernel: Any = math.prod(weight.shape[2:])
    if given.get("transposed", "transpose" in name(node)):
        groups = given.get("groups", 1)
        return math.prod(x.shape) // weight.shape[0], weight.shape[1] * groups * kernel, weight.shape[0] // groups
    n = weight.shape[0]
    return math.prod(y.shape) // n, n, weight.shape[1] * kernel
