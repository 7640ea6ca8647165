"""The pass that pads the rows of a tensor once, where it is cast both ways: on CPU tensors, by eager kernels."""

import pytest
import torch
from torch import fx

from te_inductor import ops
from te_inductor.passes.post_grad import padded_rows
from te_inductor.recipes import Quantizer

E4M3 = Quantizer("e4m3")


def traced(function, *args):
    """Traces with what a node gives in its meta, as a post-grad graph has it."""
    graph = torch.fx.Tracer().trace(function)
    values = iter(args)
    for node in graph.find_nodes(op="placeholder"):
        node.meta["val"] = next(values)
    module = fx.GraphModule(torch.nn.Module(), graph)

    class Noted(fx.Interpreter):
        def run_node(self, n):
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Noted(module).run(*args)
    return module


def cast(x, scale):
    y = x.abs()
    data, data_t = ops.quantize_rowcol_delayed(y, scale, E4M3)
    return data, data_t, torch.ops.aten.sum.dim_IntList(y, [0], False, dtype=torch.float32)


def pieces(x, scale):
    both = [x.abs(), x.neg()]
    data, data_t = ops.quantize_pieces_delayed(both, 1, scale, E4M3)
    return data, data_t


def given(x, scale):
    """An input, in front of another."""
    data, data_t = ops.quantize_rowcol_delayed(x, scale, E4M3)
    return data, data_t


def rows_alone(x, scale):
    return ops.quantize_rowcol_delayed(x, scale, E4M3)[0], x


def below(x, scale):
    """Pieces below each other have rows of their own."""
    data, data_t = ops.quantize_pieces_delayed([x, x], 0, scale, E4M3)
    return data, data_t


def count(module):
    return len(module.graph.find_nodes(op="call_function", target=ops.pad_rows))


@pytest.mark.parametrize(
    ("function", "rows", "padded"),
    [(cast, 37, 1), (cast, 48, 0), (pieces, 37, 2), (given, 37, 1), (rows_alone, 37, 0), (below, 37, 0)],
)
def test_values_stay(function, rows, padded):
    torch.manual_seed(0)
    x, scale = torch.randn(rows, 32), torch.tensor(4.0)
    module = traced(function, x, scale)
    expected = module(x, scale)
    padded_rows.pad(module.graph, ("cpu",))
    module.graph.lint()
    module.recompile()
    order = [node.op for node in module.graph.nodes]
    assert order[:2] == ["placeholder"] * 2 and "placeholder" not in order[2:]
    assert count(module) == padded
    for found, exact in zip(module(x, scale), expected, strict=True):
        assert found.shape == exact.shape and torch.equal(found.float(), exact.float())


def test_it_is_for_gpus():
    module = traced(cast, torch.randn(37, 32), torch.tensor(4.0))
    padded_rows.pad(module.graph)
    assert count(module) == 0
