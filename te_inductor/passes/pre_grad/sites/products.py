"""All matrix products of a Dynamo graph, convolutions and recurrent layers too, with their FLOPs, whether a rule takes
them or not.

A product of a weight and an activation that no rule takes belongs in the report. A weight is what is computed from
parameters and buffers alone, other than by a product with an activation or a linear layer; see `Weights`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.diagnostics import Outside, Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import source_of
from te_inductor.passes.graph.operators import GROUPED, Call, Kind, name
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import Writes
from te_inductor.passes.pre_grad.sites import contractions, convolutions

_RECURRENT = frozenset(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()  # as torch._VF has them
)
# Recurrent layers, and their cells, are one node each, which multiplies few rows: the report names and counts them.
RECURRENT = Outside("no recipe is for a recurrent layer, each step of which waits for the one before it")
_LETTERS = "".join(chr(0x200 + place) for place in range(64))  # of dimensions that an equation leaves unnamed


@dataclass(frozen=True)
class Product:
    """One node that multiplies matrices."""

    node: fx.Node
    operands: tuple[fx.Node, ...]  # what is multiplied, without what is added
    sizes: tuple[Any, Any, Any]  # (M, N, K), batches being rows
    flops: int | None  # of one call; None where a size is not known before it runs

    @property
    def grouped(self) -> bool:
        """Whether it is one product for each group of rows, as for experts."""
        return name(self.node) in GROUPED

    @property
    def pattern(self) -> str:
        """What `Site.pattern` calls it."""
        if name(self.node) in convolutions.NAMES:
            return "convolution"
        if name(self.node) in _RECURRENT:
            return "recurrent"
        return "grouped_linear" if self.grouped else "matmul"


def read(node: fx.Node) -> Product | None:
    """The node as a product, None where it is none, or sums over a single element, as an outer product does."""
    if node.op not in ("call_function", "call_method") or not (is_tensor(node) or name(node) in _RECURRENT):
        return None
    reader = _READERS.get(name(node))
    if reader is None or (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "te_inductor"):
        return None
    found = reader(node)
    if found is None or (isinstance(found.sizes[2], int) and found.sizes[2] == 1):
        return None
    return found


def is_layer(product: Product) -> bool:
    """Whether it is written as a linear layer, by which activations are made even of parameters, such as learned
    queries."""
    return name(product.node) == "linear"


def hint(size: Any) -> int | None:
    """A size as it was when the graph was traced; None of one that only a run can tell."""
    if isinstance(size, int):
        return size
    known = None if size.node.is_nested_int() else getattr(size.node, "hint", None)
    return known if isinstance(known, int) else None


class Weights:
    """The nodes of a graph, and of the bodies in it, that are weights."""

    def __init__(self, bodies: Bodies, layers: set[fx.Node], writes: Callable[[], Writes]) -> None:
        self.bodies, self.layers = bodies, layers
        self.writes = writes  # what the graph writes: such a buffer, as of keys and values, is no weight
        self._known: dict[fx.Node, str | None] = {}

    def kind(self, node: fx.Node) -> str | None:
        """What a node is computed from: "parameter", "buffer" (and no parameter), "activation"; None of neither, as of
        `torch.ones`."""
        pending = [node]  # a graph is deeper than Python's stack
        while pending:
            last = pending[-1]
            inputs = () if last in self.layers else last.all_input_nodes
            missing = [one for one in inputs if one not in self._known]
            pending += missing
            if not missing:
                self._known[last] = self._judged(last)
                pending.pop()
        return self._known[node]

    def is_weight(self, node: fx.Node) -> bool:
        return self.kind(node) in ("parameter", "buffer")

    def _judged(self, node: fx.Node) -> str | None:
        if node.op in ("placeholder", "get_attr"):
            return self._held(node)
        if node in self.layers or name(node) in ("embedding", "embedding_bag"):
            return "activation"
        kinds = {self._known[one] for one in node.all_input_nodes}
        if "activation" in kinds:
            return "parameter" if self._is_scaled(node) else "activation"
        return next((kind for kind in ("parameter", "buffer") if kind in kinds), None)

    def _held(self, node: fx.Node) -> str | None:
        if not is_tensor(node):
            return None  # a number, or the body of a higher-order op
        outer = self.bodies.outer(node)
        if outer.op not in ("placeholder", "get_attr"):
            return self.kind(outer)
        if any(is_tensor(one) and isinstance(value(one), torch.nn.Parameter) for one in (node, outer)):
            return "parameter"
        held = outer.op == "get_attr" or "_buffers" in source_of(outer)
        return "buffer" if held and not self.writes().anywhere(outer) else "activation"

    def _is_scaled(self, node: fx.Node) -> bool:
        """Whether activations only scale the elements of a parameter, or pick matrices of it: a position's embedding,
        which is a parameter as well, is added, and one of a table of vectors."""
        parameters = [one for one in node.all_input_nodes if is_tensor(one) and self._known[one] == "parameter"]
        called, kind, _ = operators.read(node)
        if kind is Kind.INDEX or called == "getitem":
            return bool(parameters) and node.args[0] is parameters[0] and value(parameters[0]).dim() > 2
        if called not in ("mul", "div") or not is_tensor(node):
            return False
        return any(_same(value(one).shape, value(node).shape) and _wide(value(one)) for one in parameters)


def refusal(product: Product, weights: Weights) -> Refusal:
    """Why no rule takes a product with a weight."""
    if product.grouped:
        return Refusal("experts' products of other shapes than rows (M, K) and weights (E, K, N), or without offsets")
    node = product.node
    if name(node) in _RECURRENT:
        return RECURRENT
    if name(node) in convolutions.NAMES and (why := convolutions.refusal(node)) is not None:
        return why
    operands = [one for one in product.operands if weights.is_weight(one)]
    if not any(weights.kind(one) == "parameter" for one in operands):
        return Refusal("the weight is a buffer, not a parameter")
    if not any(from_parameter(weights.bodies.outer(one)) or from_parameter(one) for one in operands):
        return Refusal("the weight is computed in the graph, and is no view or cast of a parameter")
    if node.target in contractions.READERS:
        return Refusal("%s is not one linear layer", _called(node))
    if Call.read(node) is None:
        return Refusal("no rule reads %s", _called(node))
    shapes = " and ".join(
        str(tuple(str(size) for size in value(one).shape)).replace("'", "") for one in product.operands
    )
    return Refusal("a product of shapes %s is not one linear layer, nor a batch of them", shapes)


def unmatched(
    products: Sequence[Product], matched: set[fx.Node], weights: Weights
) -> Iterator[tuple[Product, Refusal]]:
    """The products of a weight and an activation that no rule has taken, and why."""
    for product in products:
        kinds = [weights.is_weight(one) for one in product.operands]
        if product.node not in matched and any(kinds) and not all(kinds):
            yield product, refusal(product, weights)


def _called(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target)
    equation = node.args[0] if node.args and isinstance(node.args[0], str) else None
    return name(node) if equation is None else f"{name(node)} {equation!r}"


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return _count(a) is not None and _count(a) == _count(b)


def _wide(tensor: torch.Tensor) -> bool:
    """Whether it is a matrix, and no vector that is spread."""
    return sum(hint(size) != 1 for size in tensor.shape) > 1


def _count(sizes: Sequence[Any]) -> int | None:
    """How many elements there are, None where that is not known."""
    known = [hint(size) for size in sizes]
    return None if None in known else math.prod(known)  # type: ignore[arg-type]


def _flops(*sizes: Any) -> int | None:
    count = _count(sizes)
    return None if count is None else 2 * count


def _given(node: fx.Node, *names: tuple[str, ...]) -> list[Any]:
    """Arguments by any of the names that releases and overloads give them."""
    given = operators.arguments(node, *names)
    return [given.get(own) for own, *_ in names]


def _product(node: fx.Node, a: Any, b: Any) -> Product | None:
    """``a @ b``, batches and all."""
    if not (is_tensor(a) and is_tensor(b) and value(a).dim() and value(b).dim()):
        return None
    k, shape = value(a).shape[-1], list(value(node).shape)
    n = shape.pop() if value(b).dim() > 1 and shape else 1
    m = math.prod(shape)
    return Product(node, (a, b), (m, n, k), _flops(*shape, n, k))


def _binary(node: fx.Node) -> Product | None:
    a, b = _given(node, ("input", "self", "mat1"), ("mat2", "other", "vec", "tensor"))
    if name(node) == "__rmatmul__":
        a, b = b, a
    return _product(node, a, b)


def _added(node: fx.Node) -> Product | None:
    _, a, b = _given(node, ("input", "self"), ("mat1", "batch1", "mat"), ("mat2", "batch2", "vec"))
    found = _product(node, a, b)
    if found is None or name(node) != "addbmm":
        return found
    batch, m, k = value(a).shape
    return Product(node, (a, b), (m, found.sizes[1], batch * k), _flops(batch, m, found.sizes[1], k))


def _linear(node: fx.Node) -> Product | None:
    x, weight = _given(node, ("input",), ("weight",))
    if not (is_tensor(x) and is_tensor(weight)) or not value(weight).dim():
        return None
    *rows, k = value(x).shape
    n = value(weight).shape[-2] if value(weight).dim() > 1 else 1
    return Product(node, (x, weight), (math.prod(rows), n, k), _flops(*rows, n, k))


def _grouped(node: fx.Node) -> Product | None:
    """Reads a grouped product: of a 2D and a 3D operand each row meets one matrix; of two 2D ones what is summed over
    is cut in groups."""
    given = operators.grouped_operands(node)
    a, b = given.get("x"), given.get("weight")
    if not (is_tensor(a) and is_tensor(b)) or not {value(a).dim(), value(b).dim()} <= {2, 3}:
        return None
    of_a, n = list(value(a).shape), value(b).shape[-1]
    if value(a).dim() == 3 and value(b).dim() == 2:  # which cuts b's columns
        of_a = of_a[1:]
    *rows, k = of_a
    return Product(node, (a, b), (math.prod(rows), n, k), _flops(*rows, k, n))


def _convolution(node: fx.Node) -> Product | None:
    given = convolutions.operands(node)
    x, weight = given.get("input"), given.get("weight")
    if not (is_tensor(x) and is_tensor(weight)):
        return None
    sizes = convolutions.sizes(node)
    return Product(node, (x, weight), sizes, _flops(*sizes))


def _recurrent(node: fx.Node) -> Product | None:
    found = _recurrent_operands(node)
    if found is None:
        return None
    x, weights = found
    (*rows, _), n = value(x).shape, value(weights[0]).shape[0]
    flops = [_flops(*rows, *value(one).shape) for one in weights]
    k = sum(math.prod(value(one).shape) for one in weights) // n
    return Product(node, (x, *weights), (math.prod(rows), n, k), None if None in flops else sum(flops))  # type: ignore[arg-type]


def _bilinear(node: fx.Node) -> Product | None:
    a, b, weight = _given(node, ("input1",), ("input2",), ("weight",))
    if not all(is_tensor(one) for one in (a, b, weight)):
        return None
    rows, (n, i, j) = value(a).shape[:-1], value(weight).shape
    return Product(node, (a, b, weight), (math.prod(rows), n, i * j), _flops(*rows, n, i, j))


def _chained(node: fx.Node) -> Product | None:
    """A product of several matrices, as if from left to right."""
    operands = [one for one in pytree.tree_leaves(node.args) if is_tensor(one)]
    if len(operands) < 2 or any(value(one).dim() != 2 for one in operands):
        return None
    m, k = value(operands[0]).shape
    flops = [_flops(m, *value(one).shape) for one in operands[1:]]
    total = None if None in flops else sum(flops)  # type: ignore[arg-type]
    return Product(node, tuple(operands), (m, value(operands[-1]).shape[1], k), total)


def _contraction(read: Callable[[fx.Node], contractions.Contraction | None], node: fx.Node) -> Product | None:
    found = read(node)
    return None if found is None else _contracted(node, found.operands, found.names, found.y)


def _einsum(node: fx.Node) -> Product | None:
    operands = [one for one in pytree.tree_leaves(node.args) if is_tensor(one)]
    if len(operands) < 2:
        return None
    equation = node.args[0] if isinstance(node.args[0], str) else _of_lists(node.args)
    inputs, arrow, y = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != len(operands):
        return None
    spread = [value(one).dim() - len(of.replace("...", "")) for one, of in zip(operands, names, strict=True)]
    most = max((many for of, many in zip(names, spread, strict=True) if "..." in of), default=0)
    dots = [_LETTERS[most - many : most] if many > 0 else "" for many in spread]
    names = [of.replace("...", letters) for of, letters in zip(names, dots, strict=True)]
    if not arrow:
        once = sorted(letter for letter in set("".join(names)) if "".join(names).count(letter) == 1)
        y = "..." + "".join(letter for letter in once if letter not in _LETTERS)
    return _contracted(node, tuple(operands), names, y.replace("...", _LETTERS[:most]))


def _of_lists(args: Sequence[Any]) -> str:
    """The equation of ``einsum(a, [0, 1], b, [1, 2], [0, 2])``, an operand's dimensions behind it."""
    written = ["".join("..." if one is ... else chr(0x300 + one) for one in args[place]) for place in _behind(args)]
    y = "->" + written.pop() if len(args) % 2 else ""
    return ",".join(written) + y


def _behind(args: Sequence[Any]) -> list[int]:
    """The places of lists: every second one, and the last, where it is the output's."""
    return [*range(1, len(args), 2), *([len(args) - 1] if len(args) % 2 else [])]


def _contracted(node: fx.Node, operands: tuple[fx.Node, ...], names: Sequence[str], y: str) -> Product | None:
    """An einsum, multiplied from left to right, a letter being summed over as soon as nothing else has it."""
    sizes: dict[str, Any] = {}
    for one, letters in zip(operands, names, strict=True):
        if value(one).dim() != len(letters):
            return None
        for letter, size in zip(letters, value(one).shape, strict=True):
            if hint(sizes.get(letter, 1)) == 1:
                sizes[letter] = size
    total: int | None = 0
    held = set(names[0])
    for place, letters in enumerate(names[1:], 1):
        step = _flops(*(sizes[letter] for letter in held | set(letters)))
        total = None if total is None or step is None else total + step
        held = {letter for letter in held | set(letters) if letter in y or letter in "".join(names[place + 1 :])}
    summed = [size for letter, size in sizes.items() if letter not in y]
    if not summed:
        return None
    columns = [letter for letter in names[-1] if letter in y and letter not in names[0]]
    rows = [letter for letter in y if letter not in columns]
    m, n = (math.prod(sizes[letter] for letter in letters) for letters in (rows, dict.fromkeys(columns)))
    return Product(node, operands, (m, n, math.prod(summed)), total)


_READERS: dict[str, Callable[[fx.Node], Product | None]] = {
    **dict.fromkeys(("mm", "matmul", "__matmul__", "__rmatmul__", "imatmul", "bmm", "mv"), _binary),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addmm_", "baddbmm_", "_addmm_activation"), _added),
    **dict.fromkeys(GROUPED, _grouped),
    **dict.fromkeys(("chain_matmul", "multi_dot", "linalg_multi_dot"), _chained),
    **dict.fromkeys(convolutions.NAMES, _convolution),
    **dict.fromkeys(_RECURRENT, _recurrent),
    "linear": _linear,
    "einsum": _einsum,
    **{name: partial(_contraction, contractions.READERS[name]) for name in ("tensordot", "inner")},
    "bilinear": _bilinear,
}


def _recurrent_operands(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The input (..., K) of a recurrent layer, and its weights (N, K), each of which multiplies as many rows."""
    x, *others = node.args
    given = pytree.tree_leaves(others[1:])  # behind the state, or the lengths and states of 3 dimensions
    weights = [one for one in given if is_tensor(one) and value(one).dim() == 2]
    return (x, weights) if is_tensor(x) and weights else None
