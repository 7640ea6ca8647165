"""Gradients of experts' rows computed in the order of tokens (passes/joint/token_order.py): what is found, and that it
computes the same. Generated code: tests/offline/test_token_order.py."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from te_inductor import ops
from te_inductor.passes import joint
from te_inductor.passes.joint import token_order
from te_inductor.recipes import Quantizer
from tests.experts import MoE
from tests.passes import leave_out
from tests.support.autograd import same
from tests.support.permuted_experts import Layer

TOKENS, EACH, ROWS, WIDTH = 12, 2, 24, 24  # as wide as there are rows: a dimension is known by its place alone
FP8 = Quantizer("e5m2")


def cast(x: Tensor) -> Tensor:
    return ops.quantize_delayed(x, torch.full((), 16.0), FP8)


def given(each: int = EACH) -> dict[str, Tensor]:
    order = torch.randperm(ROWS)
    back = torch.argsort(order)
    return {
        "dout": torch.randn(ROWS // each, WIDTH),
        "order": order,
        "places": back.view(-1, each) if each > 1 else back,
        "y": torch.randn(ROWS, WIDTH),
        "w": torch.rand(ROWS),
        "column": torch.rand(WIDTH),
        "inside": torch.arange(ROWS)[:, None] < 19,
    }


def layer(dout, order, places, y, w, column, inside):
    """A layer as that of experts is: the router's weight, its gradient, and rows of no expert."""
    dy = ops.take_rows(dout, order, places)
    dw = torch.zeros(ROWS).index_put((order,), (dy * y).sum(1), accumulate=True)
    return cast(torch.where(inside, dy * w[order][:, None], 0.0)), dw


def rows_of_scales(dout, order, places, y, w, column, inside):
    data, scale_inv = ops.quantize(ops.take_rows(dout, order, places) * column, Quantizer("e4m3", scope="row"))
    return data, scale_inv


def amax_of_all(dout, order, places, y, w, column, inside):
    dy = ops.take_rows(dout, order, places).bfloat16() + y
    scale, _ = ops.current_scale([dy], FP8)
    return ops.quantize_delayed(dy, scale, FP8), dy.float().sum(-1, keepdim=True).exp()


def numbers_in_experts_order(dout, order, places, y, w, column, inside):
    dy = ops.take_rows(dout, order, places)
    return cast(dy), torch.cumsum((dy * y).sum(1), 0)


def of_two(dout, order, places, y, w, column, inside):
    return (cast(ops.take_rows(dout, order, places) * ops.take_rows(dout.sin(), order, places)),)


FOUND = {one.__name__: one for one in (layer, rows_of_scales, amax_of_all, numbers_in_experts_order, of_two)}


def mixed(dout, order, places, y, w, column, inside):
    return (cast(ops.take_rows(dout, order, places).cumsum(0)),)


def transposed(dout, order, places, y, w, column, inside):
    return (cast(ops.take_rows(dout, order, places).t() * y),)


def summed_over_rows(dout, order, places, y, w, column, inside):
    dy = ops.take_rows(dout, order, places)
    return cast(dy * column), dy.sum(0)


def read_in_experts_order(dout, order, places, y, w, column, inside):
    dy = ops.take_rows(dout, order, places)
    return cast(dy), dy + 1


def columns_beside(dout, order, places, y, w, column, inside):
    """One number a column, as many as rows."""
    return (cast(ops.take_rows(dout, order, places) * w[order]),)


def not_cast(dout, order, places, y, w, column, inside):
    return ((ops.take_rows(dout, order, places) * y).sum(1),)


LEFT = {one.__name__: one for one in (mixed, transposed, summed_over_rows, read_in_experts_order, not_cast)}


def traced(function: Any, values: dict[str, Tensor]) -> fx.GraphModule:
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*values.values())
    gm.graph.eliminate_dead_code()
    return gm


def run(function: Any, each: int) -> Counter:
    """What the graph calls behind the pass; results are the same, bit for bit."""
    values = given(each)
    gm = traced(function, values)
    expected = gm(*values.values())
    token_order.compute(gm.graph)
    gm.graph.lint()
    gm.graph.eliminate_dead_code()
    gm.recompile()
    made = gm(*values.values())
    assert same([one.float() for one in made], [one.float() for one in expected])
    return Counter(node.target for node in gm.graph.nodes)


@pytest.mark.parametrize("each", [1, EACH])
@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name, each):
    called = run(FOUND[name], each)
    copies = 2 if name == "rows_of_scales" else 1
    assert called[ops.place_rows] == copies
    assert called[ops.take_rows] == (name in ("numbers_in_experts_order", "amax_of_all"))
    if name == "layer":
        assert called[torch.ops.aten.index.Tensor] == 2 and not called[torch.ops.aten.index_put.default]  # y, inside


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    called = run(LEFT[name], 1)
    assert called[ops.place_rows] == 0 and called[ops.take_rows] == 1


def test_one_number_a_column():
    """There are as many columns as rows: it is none a row."""
    assert run(columns_beside, 1)[ops.place_rows] == 1


def of_a_number(dout, order, places, y, w, column, inside):
    return (cast(ops.take_rows(dout, order, places) * 3),)


def test_a_symbolic_factor():
    """A number is no tensor that has rows or columns."""
    values = given()
    gm = traced(of_a_number, values)
    [factor] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with gm.graph.inserting_before(factor):
        symbol = gm.graph.placeholder("number")
    symbol.meta["val"] = ShapeEnv().create_unbacked_symint()
    factor.args = (factor.args[0], symbol)
    token_order.compute(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=ops.place_rows)) == 1
    assert same(gm(*values.values(), 3), of_a_number(**values))


def step(model, x, recipe) -> list[Tensor]:
    torch.compiler.reset()
    options = {"recipe": recipe, "policy": {"gate": "none", "*": recipe}}
    compiled = torch.compile(model, backend="te", fullgraph=True, options=options)
    found: list[Tensor] = []
    for _ in range(2):
        y = compiled(x)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
    return found


MODELS = {
    "transformers": lambda: MoE(),
    "index_add": Layer,
}


@pytest.mark.usefixtures("without_codegen", "no_caches")
@pytest.mark.quick("delayed-transformers", "current-index_add")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_models(name, recipe, monkeypatch):
    """Rows of no expert, whose gradients are whatever they are, are among them."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "transformers":
        model.dropped = 17
    x = torch.randn(24, model.gate.in_features, requires_grad=True)
    found, called = [], []
    for off in (True, False):

        def run(graph, off=off):
            if not off:
                token_order.compute(graph)
                graph.lint()
            called.append(Counter(node.target for node in graph.nodes))

        with monkeypatch.context() as patch:
            leave_out(patch, joint, token_order.compute, run)
            found.append(step(model, x, recipe))
    assert same(*found)
    assert called[0][ops.take_rows] == 1
    assert called[-1][ops.take_rows] == (recipe == "rowwise")  # which writes the values, for scales of columns
