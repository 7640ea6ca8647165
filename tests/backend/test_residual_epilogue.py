"""Sums that a GEMM takes over: which are, and that the graph computes what it did. On CPU no kernel pays, so the pass
is told that each does."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import ops, recipes
from te_inductor.fused import residual_epilogue
from te_inductor.kernels.cutlass_tiles import FAST_TILES, kernel_of
from tests.support.layers import linears

SLOTS = recipes.resolve("current").slots()


KERNEL = kernel_of(FAST_TILES[0], "90", torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, "tensor", False, True)


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """The kernels that were begun to be built."""
    kernels = []
    monkeypatch.setattr(residual_epilogue, "kernel_of", lambda *_, **__: KERNEL)
    monkeypatch.setattr(residual_epilogue.build, "start", kernels.extend)
    return kernels


def layer(x, w, dtype=torch.float32):
    return linears(x, [w], [], SLOTS, dtype)[0]


def read_twice(x, w):
    y = layer(x, w)
    return x + y, y.relu()


def second(x, w):
    """The sum is the next one's residual."""
    h = x + layer(x, w)
    return h + layer(h.tanh(), w)


FOLDED = {
    "left": (lambda x, w: x + layer(x, w), 1),
    "right": (lambda x, w: layer(x, w) + x, 1),
    "both layers": (lambda x, w: layer(x, w) + layer(x.tanh(), w), 0),  # nobody else reads either
    "twice": (second, 2),
    "computed": (lambda x, w: x.sin() + layer(x, w), 0),  # by the kernel that adds
    "computed for others": (lambda x, w: (h := x.sin()) + layer(h, w), 1),
    "scaled": (lambda x, w: torch.add(x, layer(x, w), alpha=2), 0),
    "number": (lambda x, w: layer(x, w) + 1, 0),
    "read twice": (read_twice, 0),
    "broadcast": (lambda x, w: x[:1] + layer(x, w), 0),
    "output broadcast": (lambda x, w: x + layer(x[0], w), 0),
    "strided": (lambda x, w: x.transpose(0, 1) + layer(x, w), 0),
    "dtype": (lambda x, w: x + layer(x, w, torch.bfloat16), 0),
}


@pytest.mark.parametrize(("function", "count"), FOLDED.values(), ids=FOLDED.keys())
def test_which_sums_a_gemm_takes_over(function, count, begun):
    x, w = torch.randn(8, 8, 32), torch.randn(32, 32)
    traced = make_fx(function, tracing_mode="fake")(x, w)
    residual_epilogue.fold(traced.graph)
    traced.graph.lint()
    traced.recompile()
    gemms = traced.graph.find_nodes(op="call_function", target=ops.scaled_mm)
    assert sum(gemm.args[8:] != () for gemm in gemms) == count
    assert begun == [KERNEL] * count
    torch.testing.assert_close(traced(x, w), function(x, w), rtol=0, atol=0)


def test_checkpoints_treat_both_as_one():
    traced = make_fx(FOLDED["left"][0], tracing_mode="fake")(torch.randn(8, 32), torch.randn(32, 32))
    [gemm] = traced.graph.find_nodes(op="call_function", target=ops.scaled_mm)
    gemm.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    residual_epilogue.fold(traced.graph)
    assert list(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))


def test_forward_and_backward(monkeypatch, no_caches):
    """Compiled: the fold is on the joint graph, so the backward reads the sum; where no kernel adds, the lowering
    does."""

    class Block(nn.Linear):
        def forward(self, x):
            return (x + super().forward(x)).square()

    model, folded, replace = Block(32, 32), [], residual_epilogue._replace
    monkeypatch.setattr(residual_epilogue, "_replace", lambda *nodes: (folded.append(nodes), replace(*nodes)))
    run = torch.compile(model, backend="te", fullgraph=True, options={"recipe": "current", "fallback": "error"})
    x, parameters = torch.randn(8, 32, requires_grad=True), list(model.parameters())
    y = run(x)
    found = [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]
    assert len(folded) == 2  # and dx = dh + dh w
    y = (x + linears(x, [model.weight], [model.bias], SLOTS, torch.float32)[0]).square()
    expected = [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]
    for mine, theirs in zip(found, expected, strict=True):  # a few values may round to the next element of FP8
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()
