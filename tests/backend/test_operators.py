"""The vocabulary of graph operators: which operator a node calls, in each way to write it, and what permutations do."""

import operator

import pytest
import torch
from torch import fx

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind

aten = torch.ops.aten
# What is called, the arguments behind the first: its name, its kind, whether it is in place.
CALLS = [
    ((operator.add, 1), ("add", Kind.POINTWISE, False)),
    ((torch.add, 1), ("add", Kind.POINTWISE, False)),
    ((aten.add.Tensor, 1), ("add", Kind.POINTWISE, False)),
    (("__radd__", 1), ("add", Kind.POINTWISE, False)),
    ((operator.iadd, 1), ("add", Kind.POINTWISE, True)),
    (("add_", 1), ("add", Kind.POINTWISE, True)),
    (("__iadd__", 1), ("add", Kind.POINTWISE, True)),
    ((aten.add_.Tensor, 1), ("add", Kind.POINTWISE, True)),
    ((operator.truediv, 2), ("div", Kind.POINTWISE, False)),
    ((torch.floor_divide, 2), ("floordiv", Kind.POINTWISE, False)),
    (("__rsub__", 2), ("rsub", Kind.POINTWISE, False)),
    ((operator.and_, True), ("and", Kind.POINTWISE, False)),
    (("__rand__", True), ("and", Kind.POINTWISE, False)),
    ((torch.rand,), ("rand", Kind.OTHER, False)),
    ((torch.less_equal, 1), ("le", Kind.POINTWISE, False)),
    ((torch.nn.functional.gelu,), ("gelu", Kind.POINTWISE, False)),
    (("masked_fill_", 1, 0), ("masked_fill", Kind.POINTWISE, True)),
    ((operator.setitem, 0, 1), ("setitem", Kind.SCATTER, True)),
    (("sum", -1), ("sum", Kind.REDUCE, False)),
    ((torch.softmax, -1), ("softmax", Kind.OTHER, False)),
    ((aten._softmax.default, -1, False), ("softmax", Kind.OTHER, False)),
    (("double",), ("double", Kind.CAST, False)),
    ((torch.ops.prims.convert_element_type.default, torch.float32), ("convert_element_type", Kind.CAST, False)),
    (("view", 2, -1), ("view", Kind.RESHAPE, False)),
    (("view", torch.int16), ("view", Kind.BITS, False)),
    ((aten.view.dtype, torch.int16), ("view", Kind.BITS, False)),
    (("squeeze_", 0), ("squeeze", Kind.OTHER, True)),
    (("swapaxes", 0, 1), ("transpose", Kind.PERMUTE, False)),
    ((getattr, "mT"), ("mT", Kind.PERMUTE, False)),
    ((getattr, "shape"), ("shape", Kind.SIZE, False)),
    ((getattr, "grad"), ("grad", Kind.OTHER, False)),
    ((operator.getitem, 0), ("getitem", Kind.PART, False)),
    ((operator.getitem, ([0, 2],)), ("getitem", Kind.INDEX, False)),
    ((torch.ops.te_inductor.layers.default, 1), ("layers", Kind.OTHER, False)),
]


def called(target: object, *arguments: object) -> fx.Node:
    graph = fx.Graph()
    arguments = (graph.placeholder("x"), *arguments)
    return graph.call_method(target, arguments) if isinstance(target, str) else graph.call_function(target, arguments)


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_every_way_to_write_an_operator(call, expected):
    assert operators.read(called(*call)) == expected


def test_a_tensor_says_which_elements():
    node = called(operator.getitem, None)
    index = node.graph.placeholder("index")
    index.meta["example_value"] = torch.tensor([1])
    node.args = (node.args[0], index)
    assert operators.read(node).kind is Kind.INDEX
    assert operators.read(index) == ("", Kind.OTHER, False)


def test_arguments_by_their_names():
    node = called(torch.addmm, 1)
    node.kwargs = {"batch2": 2, "beta": 3}
    given = operators.arguments(node, ("first", "input", "self"), ("left", "batch1"), ("right", "batch2"))
    assert given == {"first": node.args[0], "left": 1, "right": 2, "beta": 3}


PERMUTATIONS = [
    ("t",),
    (getattr, "T"),
    (getattr, "mT"),
    (torch.adjoint,),
    ("transpose", 0, -1),
    (aten.transpose.int, -2, 0),
    ("swapdims", 1, 2),
    ("permute", 2, 0, 1),
    ("permute", (1, 2, 0)),
    (aten.permute.default, [0, 2, 1]),
    ("movedim", 0, 2),
    (torch.moveaxis, (0, 1), (2, 0)),
]


@pytest.mark.parametrize("call", PERMUTATIONS)
def test_what_permutations_do(call):
    node = called(*call)
    x = torch.arange(30).view(*((5, 6) if call in (("t",), (getattr, "T")) else (2, 3, 5)))
    y = getattr(x, call[0])(*call[1:]) if isinstance(call[0], str) else call[0](x, *call[1:])
    node.meta["example_value"] = y
    order = operators.order(node)
    assert torch.equal(x.permute(order), y)
    assert operators.swaps(node) == (True if torch.equal(y, x.mT) else None)
