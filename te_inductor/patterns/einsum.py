"""``torch.einsum`` of an activation and a parameter is a linear layer whose dimensions have other names and places. `inline`
puts that layer in its place, between the views that it takes, so that the rules see it.

Not where a letter is in both operands and in the output: that is a product for each of its values. Nor where the parameter
would have to be copied: what is summed over stands together in it, in front of the rest or behind it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.patterns.linear import from_parameter
from te_inductor.patterns.support import is_tensor, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """``y = einsum("x,p->y", x, p)``, a letter a dimension."""

    x: str
    p: str
    y: str

    @property
    def inner(self) -> str:
        """What is summed over."""
        return "".join(letter for letter in self.p if letter in self.x)

    @property
    def outer(self) -> str:
        """What the parameter gives the output."""
        return "".join(letter for letter in self.p if letter not in self.x)

    @property
    def rows(self) -> str:
        """What x gives the output."""
        return "".join(letter for letter in self.x if letter not in self.p)

    def is_linear(self) -> bool:
        names = (self.x, self.p, self.y)
        return (
            all(name.isalpha() and len(set(name)) == len(name) for name in names)
            and sorted(self.y) == sorted(self.rows + self.outer)
            and self.p in (self.inner + self.outer, self.outer + self.inner)
            and bool(self.inner and self.outer)
        )


def inline(graph: fx.Graph) -> None:
    """Replace every such node of `graph` by what it computes."""
    for node in graph.find_nodes(op="call_function", target=torch.functional.einsum):
        found = _read(node)
        if found is not None:
            _replace(node, *found)


def _read(node: fx.Node) -> tuple[fx.Node, fx.Node, Layer] | None:
    """x, p, and which dimension is which."""
    equation, *given = node.args
    operands: list[Any] = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not isinstance(equation, str) or node.kwargs or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    inputs, _, y = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    parameters = [place for place in (1, 0) if from_parameter(operands[place])]
    if len(names) != 2 or not parameters:
        return None
    place = parameters[0]
    p, x = operands[place], operands[1 - place]
    of_x, of_y = _spelled(names[1 - place], y, value(x).dim())
    layer = Layer(of_x, names[place], of_y)
    if (len(layer.x), len(layer.p)) != (value(x).dim(), value(p).dim()) or not layer.is_linear():
        return None
    sizes = ((value(x).shape[layer.x.index(letter)], value(p).shape[layer.p.index(letter)]) for letter in layer.inner)
    # 1 would be spread. Traced as a symbol, x's size stands as one here, whatever it has been found to be.
    known = (isinstance(b, int) and statically_known_true(a == b) for a, b in sizes)
    return (x, p, layer) if all(known) else None


def _spelled(x: str, y: str, dimensions: int) -> tuple[str, str]:
    """With letters that no equation has, torch knows those of ASCII, for the dimensions of an ellipsis."""
    many = dimensions - len(x.replace("...", ""))
    letters = "".join(chr(0x100 + place) for place in range(many))
    return x.replace("...", letters), y.replace("...", letters)


def _replace(node: fx.Node, x: fx.Node, p: fx.Node, layer: Layer) -> None:
    graph, output = node.graph, value(node)
    fakes = [value(x), value(p)]
    mixed = any(fake.dtype != output.dtype for fake in fakes)
    autocast = torch.autocast(output.device.type, dtype=output.dtype, enabled=mixed)
    kept = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in node.meta}

    def call(op: Any, *args: Any) -> fx.Node:
        new = graph.call_function(op, args)
        values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        with output.fake_mode, torch.set_grad_enabled(output.requires_grad), autocast:  # type: ignore[attr-defined]
            new.meta = kept | {"example_value": op(*values)}
        return new

    def in_order(x: fx.Node, found: str, wanted: str) -> fx.Node:
        return x if found == wanted else call(aten.permute.default, x, [found.index(letter) for letter in wanted])

    sizes = dict(zip(layer.p, value(p).shape, strict=True))
    n, k = ([sizes[letter] for letter in letters] for letters in (layer.outer, layer.inner))
    with graph.inserting_before(node):
        x = in_order(x, layer.x, layer.rows + layer.inner)
        if len(k) > 1:
            x = call(aten.flatten.using_ints, x, -len(k), -1)
        inner_first = layer.p.startswith(layer.inner)
        if len(layer.p) > 2:
            rows, columns = torch.Size(n).numel(), torch.Size(k).numel()
            p = call(aten.reshape.default, p, [columns, rows] if inner_first else [rows, columns])
        y = call(torch.matmul, x, p) if inner_first else call(aten.linear.default, x, p)
        if len(n) > 1:
            y = call(aten.unflatten.int, y, -1, n)
        y = in_order(y, layer.rows + layer.outer, layer.y)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
