"""Layers beside symbolic numbers: each pass reads the operands of many nodes, of which some are no tensors with dynamic
shapes. Such a program computes what it computes where the numbers are known."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from te_inductor import compat, quantize_, targets
from te_inductor.ops import experts, stored
from te_inductor.passes import post_grad
from tests import uncompiled
from tests.recipes import strict
from tests.support.autograd import same
from tests.support.kernels import H200

COLUMNS = 128  # whole blocks


def program(x: Tensor, w: Tensor, v: Tensor, n: int) -> Tensor:
    """A symbolic size, a number and a fraction are added to layers and multiply them, say how many pieces there are,
    and which dimensions are meant: of views, of sums, of a contraction, and of none."""
    h = F.relu(F.linear(x, w) + n)
    h = F.linear(h + x.shape[1], v).add_(n) / 64 + n / 7
    gate, up = F.linear(h, torch.cat([w, v])).chunk(n - 1, n - 1)
    h = F.linear(F.silu(gate) * up * n, w)
    h = F.linear(torch.cat([h, h * n, h + n], n - 1)[..., :COLUMNS].clamp(max=n), v) @ w.transpose(n - 3, n - 2)
    h = torch.tensordot(h, v, dims=([n - 1], [n - 2]))
    h = torch.einsum(h, [0, 1, n - 1], h, [0, n, n - 1], [0, 1, n])  # (2, 48, 48)
    return h / h.sum(None, True) + h.sum([n - 1], True) * n


def see(graph: fx.Graph) -> None:
    """Run the passes behind autograd, and look for symbols that a pass has put in as they are: torch cuts graphs by
    nodes, so that a backward has no other symbol."""
    for step in post_grad.PASSES:
        step(graph)
    graph.lint()
    for node in graph.nodes:
        symbols = [one for one in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(one, torch.SymInt)]
        assert not symbols, node.format_node()
    graph.owning_module.recompile()


def step(recipe: str, dynamic: bool) -> list[Tensor]:
    """A step's output and gradients, of weights that no step has seen."""
    torch.compiler.reset()
    torch.manual_seed(0)
    w, v = (torch.nn.Parameter(torch.randn(COLUMNS, COLUMNS) / 8) for _ in range(2))
    x = torch.randn(2, 48, COLUMNS, requires_grad=True)
    options: dict[str, Any] = {"recipe": recipe, "fallback": strict(recipe)}
    compiled = torch.compile(program, backend="te", fullgraph=True, dynamic=dynamic, options=options)
    y = compiled(x, w, v, 3)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, w, v])]


@pytest.mark.quick("current")
@pytest.mark.usefixtures("no_caches", "one_seed")
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8", "nvfp4"])
def test_symbolic_numbers_are_no_tensors(recipe):
    compile_fx = functools.partial(uncompiled.compile_fx, see=see, decompositions=select_decomp_table())
    with mock.patch.object(compat, "compile_fx", compile_fx):
        assert same(step(recipe, True), step(recipe, False))


@pytest.mark.parametrize("count", [0, 4])  # of experts
def test_columns_that_meet_a_stored_weight_are_its_own(count, monkeypatch):
    """torch 2.11 has a symbol for them under ``dynamic=True``, by which no kernel is looked up."""
    monkeypatch.setattr(targets, "of", lambda device: H200)
    parts = quantize_(nn.Linear(512, 256, bias=False, dtype=torch.bfloat16), "nvfp4_weight_only").weight.parts
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbols = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    x = mode.from_tensor(torch.randn(40, 512, dtype=torch.bfloat16), symbolic_context=symbols)
    whole = [part.expand(count, *part.shape) if count else part for part in parts]
    weight = [mode.from_tensor(part.contiguous(), static_shapes=True) for part in whole]
    with mode:
        if count:
            y = experts.nvfp4_product(x, torch.zeros(count, dtype=torch.int32), None, *weight)
        else:
            y = stored.NVFP4Product.product(x, *weight, "fp8", torch.bfloat16)
    assert y.shape[1] == 256
