"""Attention as programs: masks by the forms in which models write them, attention written by hand, and a backend that
runs the passes of attention alone, on any device."""

import os
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from te_inductor import config
from te_inductor.passes.pre_grad.attention import rewrite, sites
from te_inductor.passes.pre_grad.match.sites import inline_attention, inline_contractions
from te_inductor.passes.pre_grad.plan import Plan
from tests import hastened

MIN = torch.finfo(torch.float32).min


def positions(length, keys, device):
    """Query, key and batch, each of its own dimension."""
    batch = torch.arange(2, device=device)[:, None, None, None]
    return torch.arange(length, device=device)[:, None], torch.arange(keys, device=device)[None, :], batch


def by_comparison(q, k, b, padding, documents):
    return k <= q


def by_other_names(q, k, b, padding, documents):
    """The same, turned and turned back."""
    return torch.less_equal(torch.subtract(k.swapaxes(-2, -1), q.mT), 0).mT


def window(q, k, b, padding, documents):
    return (k <= q) & (k > q - 40)


def near(q, k, b, padding, documents):
    """Keys on both sides of a query, as local attention of encoders has it."""
    return abs(q - k) <= 40


def wide_window(q, k, b, padding, documents):
    return (k <= q) & (k > q - 4096)


def chunks(q, k, b, padding, documents):
    return (k <= q) & (k // 48 == q // 48)


def prefix(q, k, b, padding, documents):
    return (k <= q) | (k < 33)


def offset(q, k, b, padding, documents):
    return k <= q + 7


def full(q, k, b, padding, documents):
    return (k >= 0) & (q >= 0)


def padded(q, k, b, padding, documents):
    return (k <= q) & padding.bool()[b, k]


def padded_both_ways(q, k, b, padding, documents):
    return padding.bool()[:, None, None, :].expand(2, 1, q.shape[0], k.shape[1])


def padded_by_numbers(q, k, b, padding, documents):
    return (k <= q) & (padding.float()[b, k] != 0)


def packed(q, k, b, padding, documents):
    return (k <= q) & (documents[b, q] == documents[b, k])


def by_positions(q, k, b, padding, documents):
    """Finds packed sequences in positions as transformers does, where there is one sequence."""
    ids = torch.arange(q.shape[0], device=q.device).unsqueeze(0).expand(2, -1)
    apart = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (k <= q) & (apart[b, q] == apart[b, k])


def by_full_and_triu(q, k, b, padding, documents):
    return torch.full((q.shape[0], k.shape[1]), float("-inf"), device=q.device).triu(1)


def by_tril(q, k, b, padding, documents):
    return torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=q.device).tril()


def by_where(q, k, b, padding, documents):
    return torch.where(k <= q, 0.0, MIN)


MASKS = {  # what each is proven to be
    by_comparison: "causal",
    by_other_names: "causal",
    window: "causal, window",
    near: "causal with an offset, window",
    wide_window: "causal",
    chunks: "causal, chunks",
    prefix: "positions",
    offset: "causal with an offset",
    full: "full",
    padded: "causal, padded",
    padded_both_ways: "padded",
    padded_by_numbers: "causal, padded",
    packed: "causal, packed",
    by_positions: "causal",
    by_full_and_triu: "causal",
    by_tril: "causal",
    by_where: "causal",
}


def attention_with(mask, scale=None):
    """torch's attention with a mask, k and v repeated for groups of heads as transformers does."""

    def run(q, k, v, padding, documents):
        made = mask(*positions(q.shape[2], k.shape[2], q.device), padding, documents)
        k, v = (repeated(one, q.shape[1] // one.shape[1]) for one in (k, v))
        made = made.to(q.dtype) if made.is_floating_point() else made
        return F.scaled_dot_product_attention(q, k, v, attn_mask=made, scale=scale)

    return run


def repeated(x, times):
    batch, heads, length, width = x.shape
    if times == 1:
        return x
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def by_hand(mask, softcap=None, sinks=False, form="where"):
    """Attention as Gemma 2 and gpt-oss write it."""

    def run(q, k, v, padding, documents, sink=None):
        keep = mask(*positions(q.shape[2], k.shape[2], q.device), padding, documents)
        k, v = (repeated(one, q.shape[1] // one.shape[1]) for one in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        lowest = torch.finfo(q.dtype).min
        if form == "where":
            scores = scores + torch.where(keep, torch.zeros((), dtype=q.dtype, device=q.device), lowest)
        else:
            scores = scores.masked_fill(~keep, lowest)
        if sinks:
            scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
            weights = F.softmax(scores, dim=-1)[..., :-1]
        else:
            weights = F.softmax(scores, dim=-1).to(q.dtype)
        return torch.matmul(F.dropout(weights, p=0.0, training=True), v)

    return run


def operands(length, width=16, heads=4, groups=2, device="cpu", dtype=torch.float32):
    """q, k, v with gradients; a padding mask in which a sequence is padded on each side, and documents."""
    made = [
        torch.randn(2, length, count, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, groups, groups)
    ]
    padding = torch.ones(2, length, dtype=torch.int64, device=device)
    padding[0, : length // 3], padding[1, length - length // 4 :] = 0, 0
    documents = (torch.arange(length, device=device) // max(length // 3, 1)).expand(2, -1).contiguous()
    return made, padding, documents


def oracle(run, tensors, *more):
    """Output and gradients in float64, by torch's plain products."""
    wide = [one.detach().double().requires_grad_() for one in tensors]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y = run(*wide[:3], *more, *wide[3:])
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
        return [y, *torch.autograd.grad(y, wide, dy)], dy


def assert_same(run, compiled, tensors, *more):
    expected, dy = oracle(run, tensors, *more)
    y = compiled(*tensors[:3], *more, *tensors[3:])
    found = [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]
    for one, other in zip(found, expected, strict=True):
        # fp32 sums of at most 300 products, a few in a row.
        assert (one.double() - other).norm() <= 1e-5 * other.norm() + 1e-6


class Passes:
    """A backend of the passes of attention, without generated code; keeps what they found. Where tests are `traced`, as
    all are under `--whole`, AOTAutograd traces the graphs and divides them; else they run as rewritten, and autograd
    computes the backward, in a third of the time."""

    def __init__(self, traced=False, **options):
        self.options, self.found, self.graphs = options, [], 0
        self.traced = traced or hastened.WHOLE in os.environ

    def __call__(self, gm, inputs):
        plan = Plan(gm, config.parse(self.options), inputs)
        for each in (inline_attention, inline_contractions, sites.match_attention, rewrite.rewrite_attention):
            each(plan)
        gm.recompile()
        self.found += plan.outcome.report.attention
        self.graphs += 1
        return aot_autograd(fw_compiler=_uncompiled)(gm, inputs) if self.traced else gm.forward

    def kinds(self):
        return [site.mask for site in self.found]


def _uncompiled(gm, inputs):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention_backward):
        node.target = _flex_backward
    gm.recompile()
    return make_boxed_func(gm.forward)


def _flex_backward(*operands):
    """FlexAttention's backward on any device. It asks the tensors of a call which of them have a gradient, and in a graph
    of AOTAutograd none has: the gradients that the graph of a score returns say it."""
    *rest, biases, tensors = operands
    gradients = rest[8].graph.output_node().args[0][5:]
    biases = tuple(
        one if gradient is None else one.detach().requires_grad_()
        for one, gradient in zip(biases, gradients, strict=True)
    )
    with torch.no_grad():
        return torch.ops.higher_order.flex_attention_backward(*rest, biases, tensors)


@contextmanager
def as_on_a_gpu(monkeypatch):
    """FlexAttention wherever a GPU would have it; torch computes its operator on any device."""
    with monkeypatch.context() as patched:
        patched.setattr(sites, "_is_on_a_gpu", lambda site: True)
        patched.setattr(sites, "_may_wait", lambda site, plan: False)
        patched.setattr(sites, "FLEX_QUERIES", 1)
        patched.setattr(sites, "DROPOUT_QUERIES", 1)
        patched.setattr(sites, "BIAS_QUERIES", 1)
        yield
