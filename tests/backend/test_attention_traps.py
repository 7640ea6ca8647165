"""Programs that look like attention whose mask, scale or softmax is known, and compute something else: each gives what
it gives uncompiled, and those that no kernel computes say why they are left."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.attention import MIN, Passes, as_on_a_gpu

LENGTH = 20


def triangle():
    i = torch.arange(LENGTH)
    return i[None, :] <= i[:, None]


def of_scores(change, masked=True):
    """Attention by hand, with something done to its scores."""

    def run(q, k, v):
        scores = change(q @ k.mT * 0.25)
        return F.softmax(scores.masked_fill(~triangle(), MIN) if masked else scores, dim=-1) @ v

    return run


def of_weights(change):
    return lambda q, k, v: change(F.softmax(q @ k.mT * 0.25, dim=-1)) @ v


def of_mask(make):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make())


def mask_written_between(q, k, v):
    keep = triangle()
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    keep.logical_not_().fill_diagonal_(True)
    return first + F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def mask_of_two_dtypes(q, k, v):
    """The smallest number of float32 is minus infinity in float16: all of it but the diagonal is then hidden twice."""
    added = torch.where(triangle(), 0.0, MIN)
    half = (added.half().float() * 0.5).nan_to_num(0.0, neginf=-1.0)
    return F.softmax(q @ k.mT + added, -1) @ v + F.softmax(q @ k.mT + half, -1) @ v


def scores_as_another_dtype_has_them(q, k, v):
    scores = (q.detach() @ k.detach().mT).half()
    scores += torch.where(triangle(), 0.0, MIN).half()
    scores.add_(torch.full((), 1e-3))
    return F.softmax(scores.float(), -1) @ v


def wide_products(q, k, v):
    return F.softmax((q.double() @ k.double().mT).float(), -1) @ v


def scores_into_a_buffer(q, k, v):
    buffer = torch.empty(2, 4, LENGTH, LENGTH)
    with torch.no_grad():
        scores = torch.matmul(q, k.mT, out=buffer)
        buffer.mul_(torch.arange(LENGTH) % 3)
    return F.softmax(scores, -1) @ v


def scores_through_a_view(q, k, v):
    scores = q @ k.mT
    scores[..., 0].fill_(-5.0)
    return F.softmax(scores, -1) @ v


def cap_written_over(q, k, v):
    """What stands in the graph as the soft cap's tanh has other values by the time it is read."""
    inner = q.detach() @ k.detach().mT / 2.0
    capped = torch.tanh(inner)
    torch.neg(inner, out=capped)
    return F.softmax(capped * 2.0, -1) @ v


def scores_read_before(q, k, v):
    scores = q @ k.mT
    other = scores * 1.0
    scores /= 4.0
    return F.softmax(scores, -1) @ v + other.mean()


def keys_written_behind(q, k, v):
    keys = k.detach() * 1.0
    weights = F.softmax(q @ keys.mT, -1)
    keys.zero_()
    return weights @ v + keys


def heads_as_batches(q, k, v):
    scores = (q @ k.mT).view(4, 2, LENGTH, LENGTH)
    scores = scores.masked_fill((torch.arange(4) > 1)[:, None, None, None] & ~triangle(), MIN)
    return F.softmax(scores.view(2, 4, LENGTH, LENGTH), -1) @ v


def largest_of_all_heads(q, k, v):
    sink = torch.zeros(1, 1, 1, 1).expand(2, 4, LENGTH, 1)
    scores = torch.cat([q @ k.mT, sink], -1)
    scores = scores - scores.max(dim=1, keepdim=True).values
    return F.softmax(scores, -1)[..., :-1] @ v


def batches_of_the_mask(q, k, v):
    hidden = torch.stack([~triangle(), triangle().fill_diagonal_(False)])[:, None]
    return F.softmax((q[:1] @ k[:1].mT).masked_fill(hidden, MIN), -1) @ v[:1].expand(2, -1, -1, -1)


def viewed_without_a_copy(q, k, v):
    scores = (q @ k.mT).masked_fill(~triangle(), MIN)
    return (F.softmax(scores, -1) @ v).view(2, 4 * LENGTH, 16)


def viewed_as_torch_lays_it(q, k, v):
    """CPUs lay the output of torch's attention with a mask as it lies in q."""
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=triangle() | (torch.arange(LENGTH) < 3))
    return y.transpose(1, 2).view(2, LENGTH, 64) if y.transpose(1, 2).is_contiguous() else y


def wrapped_positions():
    i = torch.arange(LENGTH, dtype=torch.int8) * 10
    return (i[None, :] <= i[:, None]) | torch.eye(LENGTH, dtype=torch.bool)


def sum_of_truths():
    return (triangle() + (torch.arange(LENGTH) == 0)) == 1


def offsets():
    """A part of a larger mask, and one of which strides say what it has."""
    i = torch.arange(LENGTH + 3)
    larger = (i[None, :] <= i[:, None]).contiguous()
    return larger[3:, :-3] & torch.as_strided(larger, (LENGTH, LENGTH), (LENGTH + 3, 1), 3 * (LENGTH + 3))


SCALE = torch.tensor(0.3)
FOUND, LEFT, EITHER = "found", "left", "either"
PROGRAMS = {
    "softmax over queries": (lambda q, k, v: F.softmax(q @ k.mT, dim=-2) @ v, LEFT),
    "softmax over heads": (lambda q, k, v: F.softmax(q @ k.mT, dim=1) @ v, LEFT),
    "dropout of scores": (of_scores(lambda scores: F.dropout(scores, 1.0, training=True)), LEFT),
    "dropout that is off": (of_weights(lambda one: torch.dropout(one, p=0.5, train=False)), FOUND),
    "dropout of all": (of_weights(lambda one: F.dropout(one, 1.0, training=True)), EITHER),
    "weights as integers": (of_weights(lambda one: (one * 8).to(torch.int32).to(torch.float32)), LEFT),
    "weights as whole numbers": (of_weights(lambda one: one.to(torch.int32).to(torch.float32)), LEFT),
    "weights of float8": (of_weights(lambda one: one.to(torch.float8_e5m2).to(torch.float32)), LEFT),
    "scale as a tensor": (of_scores(lambda scores: scores * SCALE), LEFT),
    "products by einsum": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bhid", F.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1), v),
        "its products are written as einsum",
    ),
    "products of five dimensions": (
        lambda q, k, v: (F.softmax(q[:, :, None] @ k[:, :, None].mT, -1) @ v[:, :, None])[:, :, 0],
        "its products are none of three or four dimensions",
    ),
    "scale below zero": (of_scores(lambda scores: scores * -0.5, masked=False), LEFT),
    "scale of a reciprocal": (of_scores(lambda scores: 2.0 / (scores.abs() + 1)), LEFT),
    "scale of zero": (of_scores(lambda scores: scores * 0.0), LEFT),
    "whole quotients": (of_scores(lambda scores: torch.div(scores, 0.5, rounding_mode="floor")), LEFT),
    "cap of whole quotients": (of_scores(lambda one: torch.tanh(torch.div(one, 2.0, rounding_mode="trunc")) * 2.0), LEFT),
    "cap, then a scale": (of_scores(lambda scores: torch.tanh(scores / 2.0) * 2.0 * 3.0), LEFT),
    "two caps": (of_scores(lambda one: torch.tanh(torch.tanh(one / 2.0) * 2.0 / 3.0) * 3.0), LEFT),
    "mask, then a large scale": (
        lambda q, k, v: F.softmax((q @ k.mT).masked_fill(~triangle(), MIN) * 8.0, -1) @ v, LEFT
    ),
    "mask, then a small scale": (
        lambda q, k, v: F.softmax((q @ k.mT).masked_fill(~triangle(), MIN) / math.sqrt(16), -1) @ v, FOUND
    ),
    "mask that is turned": (of_mask(lambda: triangle().t()), FOUND),
    "mask written between": (mask_written_between, LEFT),
    "mask of two dtypes": (mask_of_two_dtypes, EITHER),
    "narrow positions": (of_mask(wrapped_positions), LEFT),
    "sum of truths": (of_mask(sum_of_truths), FOUND),
    "number that a dtype has not": (
        of_mask(lambda: torch.full((LENGTH, LENGTH), 0.5, dtype=torch.int64).bool() | triangle()), EITHER
    ),
    "storage offsets": (of_mask(offsets), LEFT),
    "scores of another dtype": (scores_as_another_dtype_has_them, LEFT),
    "products in float64": (wide_products, LEFT),
    "scores in a buffer": (scores_into_a_buffer, LEFT),
    "scores through a view": (scores_through_a_view, LEFT),
    "cap written over": (cap_written_over, LEFT),
    "scores read before": (scores_read_before, LEFT),
    "keys written behind": (keys_written_behind, LEFT),
    "heads as batches": (heads_as_batches, LEFT),
    "largest of all heads": (largest_of_all_heads, LEFT),
    "batches of the mask": (batches_of_the_mask, LEFT),
    "viewed without a copy": (viewed_without_a_copy, FOUND),
    "viewed as torch lays it": (viewed_as_torch_lays_it, FOUND),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_computes(name, monkeypatch):
    run, expected = PROGRAMS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(2, LENGTH, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    backend, results = Passes(), []
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        for each in (run, torch.compile(run, backend=backend)):
            y = each(*tensors)
            dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
            results.append([y, *torch.autograd.grad(y, tensors, dy, allow_unused=True)])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert all(
        (site.reason is None) == (site.kernel not in ("by hand", "sdpa, the mask as a tensor"))
        for site in backend.found
    )
    reasons = {site.reason for site in backend.found}
    if expected not in (FOUND, LEFT, EITHER):
        assert [site.reason for site in backend.found] == [expected]
        return
    assert {FOUND: None in reasons, LEFT: reasons != {None}, EITHER: True}[expected], backend.found
