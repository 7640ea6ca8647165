"""Products of tensor-parallel layers that torch makes one with their collectives: two real processes, gloo, CPU, the
fused operators by kernels of the program's own (async_tp_ranks.py). Results are those of the plain graph, bit for bit."""

from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import _symmetric_memory as memory

from tests.ranks import told_by

KINDS = (
    "trains current 1 2 bias,trains delayed 1 2,trains delayed 1 1 bias,trains current 0 2,trains current 1 2 other,"
    "trains block 1 2"
)
FUSED = {"symm_mem.fused_all_gather_scaled_matmul": 1, "symm_mem.fused_scaled_matmul_reduce_scatter": 1}
COLLECTIVES = {"_c10d_functional.all_gather_into_tensor": 1, "_c10d_functional.reduce_scatter_tensor": 1}
PRODUCTS = "te_inductor.scaled_mm"


told = told_by("tests.backend.async_tp_ranks", 2, KINDS, timeout=600)


def check(kind, told, fused):
    assert not any(told.said(kind))
    for found in told[kind]:
        assert found["off"] == 0.0
        plain, asked = found["graphs"]
        forward, backward = (products for products in (2, 4))
        for graphs, collectives, less in ((plain, COLLECTIVES, 0), (asked, FUSED if fused else COLLECTIVES, 2 * fused)):
            assert [graph for graph in graphs if graph == collectives | _products(forward - less)]
            assert [graph for graph in graphs if graph == collectives | _products(backward - less)]
            assert all(graph.keys() <= collectives.keys() | {PRODUCTS} for graph in graphs)


def _products(number):
    return {PRODUCTS: number} if number else {}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS.split(",") if "other" not in kind and "block" not in kind])
def test_products_are_one_with_their_collectives(kind, told):
    """Rows of the product are in another order than in the layer where a rank has a part of each of two sequences."""
    check(kind, told, fused=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["trains current 1 2 other", "trains block 1 2"])
def test_what_torch_does_not_take_stays(kind, told):
    """A group without symmetric memory; scales of blocks."""
    check(kind, told, fused=False)
    for found in told[kind]:
        assert ["has no symmetric memory, expected it to" in text for text in found["logged"]] == [True] * (
            "other" in kind
        )


@pytest.mark.parametrize("form, right", [("as torch's pass writes it", False), ("as we do", True)])
def test_which_rows_torch_scatters(form, right):
    """Two ranks with equal operands, two sequences: torch cuts the rows of a matrix where the second dimension of what it
    was is scattered. When the first case is right too, `async_tp` need not put rows in another order."""
    sequences, length, k, n, world = 2, 8, 4, 5, 2
    a, b = torch.randn(sequences, length, k), torch.randn(k, n)
    whole = world * (a.reshape(-1, k) @ b).view(sequences, length, n)
    if form == "as we do":
        matrix, dim, shape = a.transpose(0, 1).reshape(-1, k), 0, [sequences * length, n]
    else:
        matrix, dim, shape = a.reshape(-1, k), 1, [sequences, length, n]

    def multiply(a, b, scale_a, out):
        torch.mm(a, b, out=out)

    found = []
    for rank in range(world):

        def exchange(produce, out, group, rank=rank):
            for part in out.chunk(world):
                produce(rank, part)

        resolved = mock.patch.object(memory.c10d, "_resolve_process_group", lambda name: Mock(size=lambda: world))
        with resolved, mock.patch.object(memory, "_pipelined_produce_and_all2all", exchange):
            given = (multiply, matrix, b, torch.ones(()), {}, torch.float32, "sum", dim, 0, "group", list(shape))
            found.append(memory._fused_scaled_matmul_reduce_scatter_impl(*given))
    if form == "as we do":
        found = [part.view(length // world, sequences, n).transpose(0, 1) for part in found]
    assert all(torch.allclose(*pair) for pair in zip(found, whole.chunk(world, 1), strict=True)) is right
