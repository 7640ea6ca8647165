"""Other ways to write a product of an activation and a parameter: ``torch.einsum``, ``torch.tensordot``,
``torch.inner``, convolutions of one element, and a product with the parameter on the left. Each is a linear layer whose
dimensions have other names and places. `inline` puts that layer in its place, between the views that it takes, so that
the rules see it; `Inlined.undo` takes that back, where the layer stays in high precision.

Not where a letter is in both operands and in the output: that is a product for each of its values. Nor where the
parameter would have to be copied: what is summed over stands together in it, in front of the rest or behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor.passes.graph.operators import arguments
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.tracing import as_traced, lay_in
from te_inductor.passes.graph.values import is_tensor, is_wrapped, value
from te_inductor.passes.pre_grad.sites import convolutions
from te_inductor.passes.pre_grad.sites.linear import operands_of

aten = torch.ops.aten
_LETTERS = "".join(chr(0x100 + place) for place in range(64))  # which no equation has: torch knows those of ASCII


@dataclass(frozen=True)
class EinsumLayer:
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


@dataclass(frozen=True)
class Contraction:
    """A node read as an einsum of two tensors."""

    operands: tuple[fx.Node, fx.Node]
    names: tuple[str, str]
    y: str
    bias: fx.Node | None = None
    ones: int = 0  # dimensions of one element that the parameter has behind those of its name


@dataclass(frozen=True)
class Inlined:
    """A node that is a linear layer now, and what was there."""

    y: fx.Node  # in the place of the node
    others: Sequence[fx.Node]  # the views, and the layer where it is not y
    was: tuple[str, Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]  # op, target, args, kwargs, meta

    def undo(self) -> None:
        """Undoes it, as long as nothing else of the graph has been rewritten."""
        self.y.op, self.y.target, self.y.args, self.y.kwargs, self.y.meta = self.was
        for node in reversed(self.others):
            node.graph.erase_node(node)


def inline(graph: fx.Graph) -> dict[fx.Node, Inlined]:
    """Replace every such node of `graph` by what it computes, and say by which layers."""
    done = {}
    for node in list(graph.nodes):
        # A DTensor's views may redistribute it, where the call does not.
        plain = is_tensor(node) and not is_traceable_wrapper_subclass(value(node)) and not is_wrapped(node)
        if plain and node.op in ("call_function", "call_method"):
            contraction = READERS.get(node.target, _product)(node)
            found = None if contraction is None else _layer(contraction)
            if contraction is not None and found is not None:
                layer, inlined = _replace(node, *found, contraction.bias)
                done[layer] = inlined
    return done


def _layer(contraction: Contraction) -> tuple[fx.Node, fx.Node, EinsumLayer] | None:
    """x, p, and which dimension is which; None where it is no linear layer of an activation."""
    parameters = [place for place, operand in enumerate(contraction.operands) if from_parameter(operand)]
    if len(parameters) != 1:
        return None
    [place] = parameters
    p, x = contraction.operands[place], contraction.operands[1 - place]
    layer = EinsumLayer(contraction.names[1 - place], contraction.names[place], contraction.y)
    dims = value(x).dim(), value(p).dim() - contraction.ones
    if (len(layer.x), len(layer.p)) != dims or not layer.is_linear():
        return None
    sizes = ((value(x).shape[layer.x.index(letter)], value(p).shape[layer.p.index(letter)]) for letter in layer.inner)
    # 1 would be spread. Traced as a symbol, x's size stands as one here, whatever it has been found to be.
    known = (isinstance(b, int) and statically_known_true(a == b) for a, b in sizes)
    return (x, p, layer) if all(known) else None


def _einsum(node: fx.Node) -> Contraction | None:
    equation, *given = node.args
    operands: list[Any] = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not isinstance(equation, str) or node.kwargs or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    inputs, _, y = equation.replace(" ", "").partition("->")
    names, dots = inputs.split(","), "..."
    ellipses = [place for place, name in enumerate(names) if dots in name]
    if len(names) != 2 or len(ellipses) > 1:  # two would be spread over each other
        return None
    for place in ellipses:
        many = value(operands[place]).dim() - len(names[place].replace(dots, ""))
        names, y = [name.replace(dots, _LETTERS[:many]) for name in names], y.replace(dots, _LETTERS[:many])
    return Contraction((operands[0], operands[1]), (names[0], names[1]), y)


def _tensordot(node: fx.Node) -> Contraction | None:
    given = arguments(node, "a", "b", "dims")
    a, b, dims = given.get("a"), given.get("b"), given.get("dims", 2)
    if not (isinstance(a, fx.Node) and is_tensor(a) and isinstance(b, fx.Node) and is_tensor(b)) or "out" in given:
        return None
    of_a, of_b = list(_LETTERS[: value(a).dim()]), list(_LETTERS[value(a).dim() :][: value(b).dim()])
    if isinstance(dims, int):
        dims = list(range(-dims, 0)), list(range(dims))
    if not (isinstance(dims, list | tuple) and all(isinstance(dim, list | tuple) for dim in dims)):
        return None
    for dim_a, dim_b in zip(*dims, strict=True):
        of_b[dim_b] = of_a[dim_a]
    y = [letter for letter in of_a + of_b if letter not in of_a or letter not in of_b]
    return Contraction((a, b), ("".join(of_a), "".join(of_b)), "".join(y))


def _inner(node: fx.Node) -> Contraction | None:
    """Sums over the last dimension of both."""
    given = arguments(node, ("input", "self"), "other")
    a, b = given.get("input"), given.get("other")
    if not (isinstance(a, fx.Node) and is_tensor(a) and isinstance(b, fx.Node) and is_tensor(b)) or "out" in given:
        return None
    if not (value(a).dim() and value(b).dim()):  # one of which is a number
        return None
    inner, *outer = list(_LETTERS[: value(a).dim() + value(b).dim()])
    of_a, of_b = "".join(outer[: value(a).dim() - 1]), "".join(outer[value(a).dim() - 1 :][: value(b).dim() - 1])
    return Contraction((a, b), (of_a + inner, of_b + inner), of_a + of_b)


def _product(node: fx.Node) -> Contraction | None:
    """Reads a product with the parameter on the left; the rules know it on the right."""
    p, x = operands_of(node, "matmul", "mm")
    if not isinstance(p, fx.Node) or not is_tensor(x) or not from_parameter(p):
        return None
    if value(p).dim() != 2 or value(x).dim() < 2:
        return None
    m, k, n, *batch = list(_LETTERS[: value(x).dim() + 1])
    rows = "".join(batch)
    return Contraction((p, x), (m + k, rows + k + n), rows + m + n)


def _convolution(node: fx.Node) -> Contraction | None:
    if not convolutions.is_layer(node):
        return None
    given = convolutions.operands(node)
    batch, outer, inner, *rest = list(_LETTERS[: value(given["input"]).dim() + 1])
    places = "".join(rest)
    names = batch + inner + places, outer + inner
    operands = given["input"], given["weight"]
    return Contraction(operands, names, batch + outer + places, given.get("bias"), len(rest))


def _replace(
    node: fx.Node, x: fx.Node, p: fx.Node, layer: EinsumLayer, bias: fx.Node | None
) -> tuple[fx.Node, Inlined]:
    """The layer, and how to undo it."""
    graph, output = node.graph, value(node)
    fakes = [value(x), value(p)]
    kept = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in node.meta}
    new: list[fx.Node] = []

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new.append(graph.call_function(op, args, kwargs))
        values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        with as_traced(output, fakes):
            new[-1].meta = kept | {"example_value": op(*values, **kwargs)}
        return new[-1]

    def in_order(x: fx.Node, found: str, wanted: str) -> fx.Node:
        return x if found == wanted else call(aten.permute.default, x, [found.index(letter) for letter in wanted])

    sizes = dict(zip(layer.p, value(p).shape, strict=False))
    n, k = ([sizes[letter] for letter in letters] for letters in (layer.outer, layer.inner))
    made = layer.rows + layer.outer
    with graph.inserting_before(node):
        x = in_order(x, layer.x, layer.rows + layer.inner)
        if len(k) > 1:
            x = call(aten.flatten.using_ints, x, -len(k), -1)
        inner_first = layer.p.startswith(layer.inner)
        if value(p).dim() > 2:
            rows, columns = torch.Size(n).numel(), torch.Size(k).numel()
            p = call(aten.reshape.default, p, [columns, rows] if inner_first else [rows, columns])
        op = torch.matmul if inner_first else aten.linear.default
        linear = y = call(op, x, p, *([] if bias is None else [bias]))
        if len(n) > 1:
            y = call(aten.unflatten.int, y, -1, n)
        written = _written(output, layer, made)
        if made != written:  # a `view` behind it asks for it
            y = call(aten.clone.default, in_order(y, made, written), memory_format=torch.contiguous_format)
        y = in_order(y, written, layer.y)
    lay_in(output, y, new)
    was = node.op, node.target, node.args, dict(node.kwargs), node.meta
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return linear, Inlined(y, [other for other in new if other is not y], was)


def _written(output: torch.Tensor, layer: EinsumLayer, made: str) -> str:
    """The dimensions of y as torch has them in memory: as they are made, as they are named, or those of one operand
    first, in the order of names. Which, is torch's affair."""
    x_first = sorted(layer.y, key=lambda letter: letter in layer.p)
    p_first = sorted(layer.y, key=lambda letter: letter in layer.x)
    found = {letter: (output.shape[place], output.stride(place)) for place, letter in enumerate(layer.y)}
    for order in (made, layer.y, "".join(x_first), "".join(p_first)):
        expected, alike = 1, True
        for letter in reversed(order):
            size, stride = found[letter]
            alike = alike and (statically_known_true(size == 1) or statically_known_true(stride == expected))
            expected = expected * size
        if alike:
            return order
    return made


READERS: dict[Any, Callable[[fx.Node], Contraction | None]] = {
    torch.functional.einsum: _einsum,
    **dict.fromkeys((torch.functional.tensordot, "tensordot"), _tensordot),
    **dict.fromkeys((torch.inner, "inner"), _inner),
    **dict.fromkeys(convolutions.LAYERS, _convolution),
}
