"""Graphs of gate and up projections whose gradients dgrad's epilogue casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import ops
from te_inductor.fused import gated_dgrad
from te_inductor.kernels import cutlass
from te_inductor.kernels.cutlass_tiles import BLOCK_TILES, kernel_of
from te_inductor.kernels.cutlass_tiles import operands as operands_of
from te_inductor.kernels.family import Choice
from te_inductor.kernels.problem import NOTHING, Problem
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.runtime.eager import dense
from te_inductor.templates.cutlass import build, launch

M, N, K = 256, 384, 128


QUANTIZER = Quantizer("e4m3", power_2_scale=True, scope="1x128")


DGRAD = Gemm("dgrad", False, ("1x128", "128x128"))


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "square": lambda x: x * x,
}


@pytest.fixture
def pretended(monkeypatch):
    """A device that CUTLASS has kernels for, none of which can be built: the op is the eager ones."""

    def chosen(problem: Problem) -> Choice:
        gating, tile = problem.epilogue.gating, BLOCK_TILES[2]
        assert gating is not None
        kind = ("128x128", False, False, NOTHING, None, (gating.steps, gating.results))
        return Choice(cutlass.FAMILY, tile, kernel_of(tile, "90", *operands_of(problem), problem.out, *kind))

    monkeypatch.setattr(gated_dgrad, "select", chosen)
    monkeypatch.setattr(build, "start", lambda kernels: None)
    monkeypatch.setattr(launch, "_function", lambda *_: None)


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """dy and the weight, cast, and gate and up as one GEMM writes them."""
    torch.manual_seed(0)
    dy, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    both = torch.randn(M, 2 * N).to(dtype)
    return [*dense.quantize(dy, QUANTIZER), *dense.quantize(w, Quantizer("e4m3", scope="128x128")), both]


def backward(act: Callable[[Tensor], Tensor], quantizer: Quantizer = QUANTIZER, **given: Any) -> Callable[..., Any]:
    """dh by a GEMM, and what `torch.autograd` makes of it."""

    def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, both: Tensor) -> Any:
        gate, up = (x.view(2, M // 2, N) for x in (both[:, :N], both[:, N:]))
        dh = ops.scaled_mm(a, a_scale, b, b_scale, None, DGRAD, torch.bfloat16)
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        h = act(gate) * up
        dgate, dup = torch.autograd.grad(h, (gate, up), dh.view(h.shape).to(h.dtype))
        pieces = [x.reshape(M, N) for x in (dgate, dup)]
        made = ops.quantize_pieces(pieces, given.get("dim", 1), quantizer)
        more = {"dh": dh, "dgate": dgate.sum((0, 1)), "h": h}
        return made, *[more[name] for name in given.get("more", ())]

    return run


def traced(run: Callable[..., Any], given: list[Tensor]) -> fx.GraphModule:
    gm = make_fx(run, decomposition_table=select_decomp_table())(*given)
    gm.graph.eliminate_dead_code()
    return gm


def folded(gm: fx.GraphModule) -> list[fx.Node]:
    gated_dgrad.fold(gm.graph)
    gm.graph.lint()
    gm.recompile()
    op = torch.ops.te_inductor.cutlass_gated_gradient.default
    return list(gm.graph.find_nodes(op="call_function", target=op))
