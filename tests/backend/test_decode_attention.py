"""The attention that becomes one op: `decode_attention.match` on graphs as torch decomposes them."""

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import ops
from te_inductor.fused import decode_attention

B, H, M, N, D = 2, 3, 4, 40, 64


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)).float() * 0.125
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype) @ v


def kept(q, k, v, mask):
    scores = (q @ k.transpose(2, 3)).float() / 8
    return torch.where(mask, scores, float("-inf")).softmax(-1).to(q.dtype) @ v


def dropped(q, k, v, mask):
    return (q @ k.transpose(2, 3)).masked_fill(mask, float("-inf")).softmax(-1) @ v


def plain(q, k, v, mask):
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def biased(q, k, v, mask):
    return ((q @ k.transpose(2, 3)) + mask).softmax(-1) @ v


def over_queries(q, k, v, mask):
    return (q @ k.transpose(2, 3)).softmax(-2) @ v


def finite(q, k, v, mask):
    return (q @ k.transpose(2, 3)).masked_fill(~mask, -1e4).softmax(-1) @ v


def found(function, mask_shape=(1, 1, 1, N)):
    q, k, v = (torch.randn(B, H, length, D).bfloat16() for length in (M, N, N))
    inputs = (q, k, v, torch.rand(mask_shape) < 0.5)
    module = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    node = [node for node in module.graph.nodes if node.target is torch.ops.aten.bmm.default][-1]
    return module, node, decode_attention.match(node), inputs


@pytest.mark.parametrize(
    ("function", "drops", "scale"),
    [(attention, False, 0.125), (kept, False, 0.125), (dropped, True, 1.0), (plain, None, 1.0)],
)
def test_found(function, drops, scale):
    """The op computes what the graph does, with one rounding less."""
    module, node, attention, inputs = found(function)
    assert attention is not None and attention.scale == scale
    assert (attention.mask is None) if drops is None else (attention.drops is drops)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(decode_attention._emit(module.graph, attention))
    module.graph.eliminate_dead_code()
    module.recompile()
    targets = {node.target for node in module.graph.nodes}
    assert ops.decode_attention in targets and torch.ops.aten.bmm.default not in targets
    y, expected = module(*inputs).float(), function(*(x.float() if x.is_floating_point() else x for x in inputs))
    assert ((y - expected).abs() <= 2.0**-7 * expected.abs() + 1e-3).all()


@pytest.mark.parametrize("function", [biased, over_queries, finite])
def test_not_found(function):
    assert found(function)[2] is None


def test_masks_of_queries():
    """Each of its own: the kernels take one for all."""
    assert found(attention, (1, 1, M, N))[2] is None
    assert found(attention, (B, 1, 1, N))[2] is None
