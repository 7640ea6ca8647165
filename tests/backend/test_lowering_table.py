"""Inductor's table of lowerings during our compiles: what others register meanwhile stays."""

import pytest
import torch

from te_inductor import lowerings

aten = torch.ops.aten
GRAPH = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())


@pytest.fixture
def table():
    from torch._inductor.lowering import lowerings as table

    lowerings.install()
    before = dict(table)
    yield table
    table.clear()
    table.update(before)


def test_what_others_register_stays(table):
    inductors, theirs = table[aten.argmax], object()

    def compile_graph(graph):
        assert table[aten.argmax] is not inductors
        table["an op"], table[aten.argmax.default] = theirs, theirs

    lowerings.install()(compile_graph)(GRAPH)
    assert table["an op"] is theirs and table[aten.argmax.default] is theirs
    assert table[aten.argmax] is inductors


def test_compiles_side_by_side(table):
    """The first to begin ends first."""
    from te_inductor.lowerings import decode

    inductors = table[aten.argmax]
    first, second = decode.replaced(), decode.replaced()
    first.__enter__()
    ours = table[aten.argmax]
    second.__enter__()
    first.__exit__(None, None, None)
    assert table[aten.argmax] is ours is not inductors
    second.__exit__(None, None, None)
    assert table[aten.argmax] is inductors


def test_a_compile_that_fails(table):
    inductors = table[aten.argmax]

    def fails(graph):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lowerings.install()(fails)(GRAPH)
    assert table[aten.argmax] is inductors
