"""Rows that a sort brings into the experts' order, and back: gathers both ways, with sums in fp32."""

import pytest
import torch
from torch import Tensor

from te_inductor import compat, ops
from tests import uncompiled
from tests.support.permuted_experts import DIM, EACH, TOKENS, Layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype):
    """Results are what fp64 makes of the sums of `index_add` and autograd."""
    torch.manual_seed(0)
    order = torch.randperm(TOKENS * EACH)
    x = torch.randn(TOKENS, DIM, dtype=dtype, requires_grad=True)
    rows = ops.spread_rows(x, order, EACH)
    assert torch.equal(rows, x[order // EACH])
    grad = torch.randn_like(rows)
    [dx] = torch.autograd.grad(rows, x, grad)
    wide = torch.zeros(TOKENS, DIM, dtype=torch.float64).index_add(0, order // EACH, grad.double())
    exact = EACH * torch.finfo(torch.float32).eps * wide.abs().max()
    assert ((dx.double() - wide).abs() <= torch.finfo(dtype).eps * wide.abs() + exact).all()

    rows = torch.randn(TOKENS * EACH, DIM, dtype=dtype, requires_grad=True)
    y = ops.sum_rows(rows, order, EACH)
    wide = torch.zeros(TOKENS, DIM, dtype=torch.float64).index_add(0, order // EACH, rows.detach().double())
    assert ((y.double() - wide).abs() <= torch.finfo(dtype).eps * wide.abs() + exact).all()
    grad = torch.randn_like(y)
    assert torch.equal(*torch.autograd.grad(y, rows, grad), grad[order // EACH])


def test_what_is_no_number_stays_in_its_row():
    order, rows = torch.randperm(TOKENS * EACH), torch.ones(TOKENS * EACH, DIM)
    rows[5], rows[7] = torch.nan, torch.inf
    y = ops.sum_rows(rows, order, EACH)
    hit = {int(order[5]) // EACH: torch.nan, int(order[7]) // EACH: torch.inf}
    assert [row for row in range(TOKENS) if not y[row].isfinite().all()] == sorted(hit)


def test_what_lies_behind_the_last_group_is_zeros():
    """Bytes in memory are so, in generated code as eagerly, whatever lies there; all others are what they were."""
    bits = torch.arange(256, dtype=torch.uint8).repeat(3).view(48, 16)
    data, ends = bits.view(torch.float8_e5m2), torch.tensor([5, 5, 40], dtype=torch.int32)
    run = torch.compile(lambda *args: ops.mask_copy(*args).view(torch.uint8), backend="te", fullgraph=True)
    for made in (run(data, ends), ops.mask_copy(data, ends).view(torch.uint8)):
        assert torch.equal(made[:40], bits[:40]) and not made[40:].any()


class InPlace(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        y = torch.zeros(TOKENS, DIM)
        y.index_add_(0, order // EACH, rows)
        y.mul_(2)
        return y + y.sin()


class Scattered(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return x.new_zeros(x.shape).scatter_add(0, (order // EACH).reshape(-1, 1).expand(-1, DIM), rows)


class Weighted(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, order // EACH, rows, alpha=2)


class Added(Layer):
    """A layer whose rows are added to what is no zeros."""

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return x.index_add(0, order // EACH, rows)


class ReadBefore(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        first = y + 1
        y.index_add_(0, order // EACH, rows)
        return y + first


class Unsorted(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, order // EACH % 3, rows)


class IndexWritten(Layer):
    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        index = order // EACH
        index.masked_fill_(order % 7 == 0, 0)
        return torch.zeros_like(x).index_add(0, index, rows)


class OrderWritten(Layer):
    """A layer whose order is written behind the index that is made of it, whose gradient would be read by it."""

    writes = True

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        index = order // EACH
        order.view(-1)[::2] = 0
        return torch.zeros_like(x).index_add(0, index, rows)


class WrittenBehind(Layer):
    """Nobody reads what is written then. (Autograd would.)"""

    writes = True
    trains = False

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        index = order // EACH
        y = torch.zeros_like(x).index_add(0, index, rows)
        index.zero_()
        order.zero_()
        return y


class OtherColumn(Layer):
    """A layer whose places are a column in another order."""

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        column = (order // EACH)[torch.arange(len(order)).flip(0), None]
        return torch.zeros_like(x).scatter_add(0, column.expand(-1, DIM), rows)


class IntoMemory(Layer):
    """A layer whose sums go to memory that the program reads by another name."""

    trains = False

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        kept = torch.ones(TOKENS, DIM)
        torch.index_add(torch.zeros_like(x), 0, order // EACH, rows, out=kept.view(TOKENS, DIM))
        return kept + x


class ZerosInMemory(Layer):
    """A layer whose zeros are in such memory."""

    trains = False

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        kept = torch.ones(TOKENS, DIM)
        torch.zeros(TOKENS, DIM, out=kept.view(TOKENS, DIM)).index_add_(0, order // EACH, rows)
        return kept + x


class RowsGiven(Layer):
    """Rows that no operator of the graph makes."""

    def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        given = torch.cat([x] * EACH)
        rows = torch.zeros_like(x).scatter_add(0, (order // EACH).reshape(-1, 1).expand(-1, DIM), given) + rows.sum()
        return rows


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, 1) for kind in (Layer, InPlace, Scattered, RowsGiven, WrittenBehind)),
        *((kind, 0) for kind in (Weighted, Added, ReadBefore, Unsorted, IndexWritten, OrderWritten)),
        *((kind, 0) for kind in (OtherColumn, IntoMemory, ZerosInMemory)),
    ],
)
def test_sums(monkeypatch, kind, found):
    """Sums are gathers, and they are what the model says."""
    check(monkeypatch, kind(), "sum_rows", found)


def filled(order: Tensor, places: Tensor) -> Tensor:
    back = torch.zeros_like(order)
    back[order] = places
    return back


def written_behind(order: Tensor) -> Tensor:
    back = order.argsort()
    order.zero_()
    return back


BACKS = {
    "argsort": (lambda order: order.argsort(), 1),
    "filled": (lambda order: filled(order, torch.arange(len(order))), 1),
    "descending": (lambda order: order.argsort(descending=True), 0),
    "back": (lambda order: order.argsort().add_(1).remainder_(len(order)), 0),
    "a view": (lambda order: (back := order.argsort()).view(2, -1).copy_(back.view(2, -1).flip(0)).view(-1), 0),
    "order": (written_behind, 0),
    "places": (lambda order: filled(order, torch.arange(len(order)).mul_(-1).add_(len(order) - 1)), 0),
    "one place": (lambda order: filled(order, torch.arange(1)), 0),
}


@pytest.mark.parametrize("back", BACKS)
def test_rows_that_are_brought_back(monkeypatch, back):
    """`permute_rows` where `back` is the inverse of a sort still, when it is read."""
    made, found = BACKS[back]

    class Back(Layer):
        def result(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
            return rows[made(order)].view(TOKENS, EACH, DIM).sum(1)

    model = Back()
    model.writes = back == "order"
    check(monkeypatch, model, "permute_rows", found)


def check(monkeypatch, model: Layer, op: str, found: int) -> None:
    """How often an op stands in the graph, and that outputs and gradients are those of high precision."""
    torch.manual_seed(1)
    x, called = torch.randn(TOKENS, DIM), list[list[str]]()

    def compile_fx(gm, *rest):
        called.append([str(node.target) for node in gm.graph.nodes])
        return uncompiled.run_rewritten(gm)

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    made = []
    for policy in ({"gate": "none", "*": "current"}, {"*": "none"}):
        x = x.detach().requires_grad_(model.trains)
        with torch.set_grad_enabled(model.trains):
            y = torch.compile(model, backend="te", fullgraph=True, options={"policy": policy, "fallback": "silent"})(x)
        made.append((y.detach(), *(torch.autograd.grad(y.square().sum(), x) if model.trains else ())))
    assert [names.count(f"te_inductor.{op}.default") for names in called] == [found, 0]
    for low, high in zip(*made, strict=True):
        assert (low - high).norm() < 0.15 * high.norm()  # of FP8's own error twice
