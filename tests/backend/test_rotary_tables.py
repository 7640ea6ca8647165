"""Tables of rotary positions are computed once in a graph, whichever kernels read them (rotary_tables.py)."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor.passes import post_grad
from te_inductor.passes.graph import node_kinds
from te_inductor.passes.post_grad import rotary_tables
from tests.passes import leave_out

HEADS, SIZE = 4, 32


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def tables(positions):
    angles = positions[:, None].float() * torch.linspace(1.0, 0.01, SIZE // 2)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()  # tokens x head size


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in range(3))

    def forward(self, x, positions):  # (batch, tokens, heads x head size), (tokens,)
        cos, sin = tables(positions)
        for layer in self.layers:
            y = layer(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            x = (y * cos + turned(y) * sin).transpose(1, 2).flatten(2)
        return x


@pytest.mark.thorough
@pytest.mark.usefixtures("no_caches")
@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_computed_once(recipe, dynamic, monkeypatch):
    model = Model().bfloat16()
    x = torch.randn(2, 64, HEADS * SIZE, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(64)
    compiled = torch.compile(model, backend="te", options={"policy": {"*": recipe}})

    def computed():
        torch._dynamo.reset()
        if dynamic:
            torch._dynamo.mark_dynamic(x, (0, 1))
            torch._dynamo.mark_dynamic(positions, 0)
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x, positions))
        return [len(re.findall(r"^[^#\n]*\b(?:cos|sin)\(", code, re.MULTILINE)) for code in codes]

    counts = computed()
    leave_out(monkeypatch, post_grad, rotary_tables.keep)
    before = computed()
    assert set(counts) == {2}  # a cosine and a sine, in each forward and in the backward
    assert min(before) > 2


def marked(function, *shapes):
    """The operators whose values are to be in memory."""
    inputs = (torch.empty(shape) for shape in shapes)
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs).graph
    rotary_tables.keep(graph)
    return [str(node.target) for node in graph.nodes if node.meta.get(node_kinds.IN_MEMORY)]


def test_in_the_dtype_that_is_read():
    found = marked(lambda angles, q: q * (angles.cos() * 0.5).bfloat16()[:, None], (8, 64, 32), (8, 4, 64, 32))
    assert found == ["prims.convert_element_type.default"]


def test_read_in_two_dtypes():
    def function(angles, q, k):
        cos = angles.cos()
        return q * cos[:, None], k * cos.bfloat16()[:, None]

    found = marked(function, (8, 64, 32), (8, 4, 64, 32), (8, 2, 64, 32))
    assert found == ["aten.cos.default", "prims.convert_element_type.default"]


def test_no_table():
    """A kernel of a tensor that nothing larger is computed from would write and read what it has."""
    assert not marked(lambda x, y: x.sin() * y + x.cos(), (64, 32), (64, 32))
    assert not marked(lambda x, y: x.sin().sum(-1) * y, (64, 32), (64,))
