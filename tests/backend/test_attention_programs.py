"""Programs around attention that are legal uncompiled, and in which a mask, its sizes, its dtype or its place is not what
it seems: each gives what it gives uncompiled, with the gradients, whichever kernel runs."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests.attention import MIN, Passes, as_on_a_gpu

LENGTH = 20
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def grid(queries=LENGTH, keys=LENGTH):
    return torch.arange(queries)[:, None], torch.arange(keys)[None, :]


def triangle(queries=LENGTH, keys=LENGTH):
    i, j = grid(queries, keys)
    return j <= i


def sdpa(mask, **options):
    """torch's function with a mask that is made of q, k and v."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, k, v), **options)


def by_hand(scored, weighed=lambda weights: weights, softmax=lambda scores: F.softmax(scores, -1)):
    return lambda q, k, v: weighed(softmax(scored(q @ k.mT))) @ v


def cut(queries, keys, run):
    return lambda q, k, v: run(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys])


# ---- masks that are written, kept, learned, or made where gradients are off ----


def mask_written_behind_its_use(q, k, v):
    keep = triangle().clone()
    first = F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), attn_mask=keep)
    keep.zero_().fill_diagonal_(True)
    return first + q


def positions_written_between_layers(q, k, v):
    i = torch.arange(LENGTH)
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=i[None, :] <= i[:, None])
    i.neg_()
    return x + F.scaled_dot_product_attention(q, k, v, attn_mask=i[None, :] <= i[:, None])


class Cached(nn.Module):
    """Keeps the mask of the longest sequence that it has seen, as many models do."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, q, k, v):
        if self.mask is None or self.mask.shape[0] < q.shape[2]:
            self.mask = triangle(q.shape[2], q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[: q.shape[2], : q.shape[2]])


def output_is_written(q, k, v):
    y = F.softmax((q @ k.mT).masked_fill(~triangle(), -math.inf), -1) @ v
    y.transpose(1, 2)[:, 1:].mul_(0.5)
    y += v
    return y


def mask_kept_for_other_lengths(q, k, v):
    module = Cached()
    first = [module(q[:, :, :length], k[:, :, :length], v[:, :, :length]) for length in (7, 5)]
    module.mask = module.mask.tril(-1).logical_not()
    return torch.cat([*first, module(q[:, :, :6], k[:, :, :6], v[:, :, :6]), module(q, k, v)], 2)


def mask_without_gradients(q, k, v):
    with torch.no_grad():
        scores = (q @ k.mT).masked_fill(~triangle(), MIN)
        hidden = F.softmax(scores, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(hidden > 0, 0.0, -math.inf)) + hidden @ v


def values_alone_learn(q, k, v):
    with torch.no_grad():
        scores = q @ k.mT
    return F.softmax(scores.masked_fill(~triangle(), MIN), -1) @ v


def keys_are_turned_without_gradients(q, k, v):
    with torch.no_grad():
        turned = k.mT
    return F.softmax((q @ turned).masked_fill(~triangle(), MIN), -1) @ v


def keys_are_repeated_without_gradients(q, k, v):
    with torch.no_grad():
        repeated = k[:, :2].repeat_interleave(2, dim=1)
    return F.scaled_dot_product_attention(q, repeated, v[:, :2].repeat_interleave(2, dim=1), attn_mask=triangle())


def all_without_gradients(q, k, v):
    with torch.no_grad():
        y = F.softmax((q @ k.mT).masked_fill(~triangle(), MIN), -1) @ v
    return y + q


def mask_with_a_gradient(q):
    """Nothing but zeros and minus infinity, as a straight-through estimator has it."""
    gate = q.mean(-1, keepdim=True)
    return torch.where(triangle(), gate - gate.detach(), -math.inf)


def bias_with_a_gradient(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(q * k).mean(-1, keepdim=True) + torch.zeros(LENGTH))


# ---- sizes: lengths that differ, single queries, nothing at all, masks that are broadcast ----


def is_causal_by_hand_of_last_queries(q, k, v):
    keep = torch.ones(7, LENGTH, dtype=torch.bool).tril(diagonal=LENGTH - 7)
    return F.softmax((q[:, :, :7] @ k.mT).masked_fill(~keep, -math.inf), -1) @ v


def two_attentions_of_other_lengths(q, k, v):
    i, j = grid()
    near = (j <= i) & (j > i - 6)
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
    half = F.scaled_dot_product_attention(q[:, :, :10], k[:, :, :10], v[:, :, :10], attn_mask=near[:10, :10])
    return whole + F.pad(half, (0, 0, 0, 10))


def offsets_of_batches(q, k, v):
    i, j = grid()
    return j <= i + torch.tensor([3, -2])[:, None, None, None]


def windows_of_heads(q, k, v):
    i, j = grid()
    return (j <= i) & (i - j < torch.tensor([2, 5, 9, 40])[:, None, None])


def mask_of_three_dimensions(q, k, v):
    """Its first dimension is that of heads."""
    return triangle() & (torch.arange(4)[:, None, None] * 3 <= torch.arange(LENGTH))


def keys_of_a_batch_of_queries(q, k, v):
    return triangle()[:, None, None, :][2:4]


def one_query_of_all(q, k, v):
    return triangle()[-1:]


# ---- what a user says of positions that is not so ----


def positions_that_lie(positions):
    """Finds packed sequences as transformers does, in positions that a user gives."""

    def mask(q, k, v):
        apart = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return triangle() & (apart[:, None, :, None] == apart[:, None, None, :])

    return mask


def causal_by_given_positions(q, k, v):
    positions = torch.arange(LENGTH - 1, -1, -1).expand(2, -1) // 2
    return positions[:, None, None, :] <= positions[:, None, :, None]


# ---- numbers ----


def soft(q, k, v):
    i, j = grid()
    return torch.where(j <= i, -0.1 * (i - j), -math.inf)


def of_numbers(hidden):
    return lambda q, k, v: torch.where(triangle() & (torch.arange(LENGTH) > 2), 0.0, hidden)


def numbers_of(dtype):
    """Rows without a key: what the smallest number of a narrower dtype leaves of scores in float32 decides."""

    def scored(scores):
        keep = triangle() & (torch.arange(LENGTH) > 2)
        return scores + torch.where(keep, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    return scored


def masked(scores, fill=MIN):
    return scores.masked_fill(~(triangle() & (torch.arange(LENGTH) > 2)), fill)


def rolled(scores):
    """A mask of which a row is that of another query."""
    return scores + torch.zeros(LENGTH, LENGTH).masked_fill(~triangle(), -math.inf).roll(1, 0)


def hidden_then_cast(dtype):
    return lambda scores: masked(scores).to(dtype)


def upcast(q, k, v):
    weights = F.softmax(masked((q.half() @ k.half().mT).float() / 4.0), -1, dtype=torch.float32)
    return weights.half().float() @ v


def in_autocast(run):
    def cast(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return run(q, k, v)

    return cast


def hidden_keys():
    return (torch.arange(LENGTH) < 13).expand(2, 1, LENGTH, LENGTH)


def empty_rows(q, k, v):
    return torch.where(triangle() & (torch.arange(LENGTH) > 2), 0.0, MIN)


# ---- programs in programs ----


def in_vmap(q, k, v):
    return torch.func.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=triangle()))(q, k, v)


def by_hand_in_vmap(q, k, v):
    return torch.func.vmap(lambda q, k, v: F.softmax((q @ k.mT).masked_fill(~triangle(), MIN), -1) @ v)(q, k, v)


def in_grad(q, k, v):
    of = torch.func.grad(lambda v: sdpa(lambda *_: triangle())(q.detach(), k.detach(), v).square().sum())
    return of(v.detach()) + q


def in_another_compile(q, k, v):
    inner = torch.compile(sdpa(lambda *_: triangle()), backend="eager")
    return inner(q, k, v) + sdpa(lambda *_: triangle())(q, k, v)


def in_a_condition(q, k, v):
    return torch.cond(q.sum() > 0, sdpa(lambda *_: triangle()), sdpa(lambda *_: triangle().mT), (q, k, v))


def multi_head(**more):
    torch.manual_seed(3)
    module = nn.MultiheadAttention(64, 4, batch_first=True).requires_grad_(False)

    def run(q, k, v):
        q, k, v = (one.transpose(1, 2).flatten(2) for one in (q, k, v))
        padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [9]])
        return module(q, k, v, key_padding_mask=padding, **more)[0]

    return run


PROGRAMS = {
    "mask written behind its use": mask_written_behind_its_use,
    "positions written between layers": positions_written_between_layers,
    "output is written": output_is_written,
    "mask kept for other lengths": mask_kept_for_other_lengths,
    "mask without gradients": mask_without_gradients,
    "values alone learn": values_alone_learn,
    "keys are turned without gradients": keys_are_turned_without_gradients,
    "keys are repeated without gradients": keys_are_repeated_without_gradients,
    "all without gradients": all_without_gradients,
    "mask with a gradient": sdpa(lambda q, k, v: mask_with_a_gradient(q)),
    "mask with a gradient, by hand": lambda q, k, v: F.softmax(q @ k.mT + mask_with_a_gradient(q), -1) @ v,
    "bias with a gradient": bias_with_a_gradient,
    "is_causal, fewer queries": cut(7, LENGTH, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "is_causal, fewer keys": cut(LENGTH, 7, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "triangle, fewer queries": cut(7, LENGTH, sdpa(lambda *_: triangle(7))),
    "triangle, fewer keys": cut(LENGTH, 7, sdpa(lambda *_: triangle(LENGTH, 7))),
    "lower right": cut(7, LENGTH, sdpa(lambda *_: causal_lower_right(7, LENGTH))),
    "upper left": cut(7, LENGTH, sdpa(lambda *_: causal_upper_left(7, LENGTH))),
    "last queries": is_causal_by_hand_of_last_queries,
    "one query, is_causal": cut(1, LENGTH, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "one query of a triangle": cut(1, LENGTH, sdpa(lambda *_: triangle(1))),
    "one query of all": cut(1, LENGTH, sdpa(one_query_of_all)),
    "one key": cut(LENGTH, 1, sdpa(lambda *_: triangle(LENGTH, 1))),
    "no query": cut(0, LENGTH, sdpa(lambda *_: triangle(0))),
    "no key": cut(LENGTH, 0, sdpa(lambda *_: triangle(LENGTH, 0))),
    "no key, by hand": cut(LENGTH, 0, by_hand(lambda scores: scores.masked_fill(~triangle(LENGTH, 0), MIN))),
    "no batch": lambda q, k, v: sdpa(lambda *_: triangle())(q[:0], k[:0], v[:0]),
    "two attentions of other lengths": two_attentions_of_other_lengths,
    "offsets of batches": sdpa(offsets_of_batches),
    "windows of heads": sdpa(windows_of_heads),
    "mask of three dimensions": sdpa(mask_of_three_dimensions),
    "keys of a batch of queries": sdpa(keys_of_a_batch_of_queries),
    "positions that start again": sdpa(positions_that_lie(torch.arange(LENGTH).expand(2, -1) % 7)),
    "positions that jump": sdpa(positions_that_lie(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 4).view(2, LENGTH))),
    "positions that fall": sdpa(causal_by_given_positions),
    "soft numbers": sdpa(soft),
    "large numbers": sdpa(of_numbers(-1e4)),
    "very large numbers": sdpa(of_numbers(-1e30)),
    "NaN in a mask": sdpa(of_numbers(math.nan)),
    "numbers above zero": sdpa(of_numbers(math.inf)),
    "numbers of float16": by_hand(numbers_of(torch.float16)),
    "numbers of bfloat16": by_hand(numbers_of(torch.bfloat16)),
    "hidden, then as float16": by_hand(hidden_then_cast(torch.float16), lambda one: one.float()),
    "hidden, then as bfloat16": by_hand(hidden_then_cast(torch.bfloat16), lambda one: one.float()),
    "hidden, then as float64": by_hand(hidden_then_cast(torch.float64), lambda one: one.float()),
    "upcast": upcast,
    "truths that are added": by_hand(lambda scores: scores + triangle()),
    "truths that are added to a bias": sdpa(lambda q, k, v: SLOPES[:, None, None] + triangle()),
    "integers that are added": by_hand(lambda scores: scores - 10000 * (~triangle()).long()),
    "integers of zeros": by_hand(lambda scores: scores + torch.zeros(LENGTH, LENGTH, dtype=torch.int64)),
    "minus infinity is added": by_hand(rolled),
    "softmax in float16": by_hand(masked, lambda one: one.float(), partial(F.softmax, dim=-1, dtype=torch.float16)),
    "turned by an attribute": sdpa(lambda *_: triangle().mT),
    "truths that are multiplied": by_hand(lambda scores: scores * triangle()),
    "weights that are masked": by_hand(lambda scores: scores, lambda weights: weights.masked_fill(~triangle(), 0.0)),
    "weights that are made to add up": by_hand(masked, lambda one: one / one.sum(-1, keepdim=True)),
    "weights of a softmax of weights": by_hand(masked, lambda one: F.softmax(one, -1)),
    "softmax of a logarithm": by_hand(masked, softmax=lambda scores: F.log_softmax(scores, -1)),
    "softmax of all": by_hand(masked, softmax=lambda one: F.softmax(one.flatten(2), -1).view_as(one)),
    "where behind a scale": by_hand(lambda scores: torch.where(triangle(), scores * 0.2, MIN)),
    "where in front of a scale": by_hand(lambda scores: torch.where(triangle(), scores, MIN) * 0.2),
    "where, turned": by_hand(lambda scores: torch.where(triangle(), MIN, scores)),
    "where of two scores": by_hand(lambda scores: torch.where(triangle(), scores, scores * 0.5)),
    "where of a tensor": by_hand(lambda scores: torch.where(triangle(), scores, torch.full_like(scores, MIN))),
    "masked twice": by_hand(lambda scores: masked(masked(scores) * 0.5, -math.inf).nan_to_num(0.0)),
    "largest of scores": by_hand(lambda scores: scores.masked_fill(scores < scores.topk(5, -1).values[..., -1:], -math.inf)),
    "autocast, by hand": in_autocast(by_hand(lambda scores: scores + empty_rows(None, None, None))),
    "autocast": in_autocast(sdpa(empty_rows)),
    "autocast, dropout": in_autocast(sdpa(lambda *_: hidden_keys(), dropout_p=1e-30)),
    "autocast, two dtypes": lambda q, k, v: in_autocast(sdpa(lambda *_: hidden_keys(), dropout_p=1e-30))(q.bfloat16(), k, v),
    "autocast, is_causal": in_autocast(sdpa(lambda *_: triangle())),
    "vmap": in_vmap,
    "vmap, by hand": by_hand_in_vmap,
    "grad": in_grad,
    "compile": in_another_compile,
    "cond": in_a_condition,
    "multi-head attention": multi_head(need_weights=False),
    "multi-head attention, weights": multi_head(),
    "multi-head attention, causal": multi_head(attn_mask=~triangle(), need_weights=False),
    "multi-head attention, numbers": multi_head(attn_mask=torch.zeros(LENGTH, LENGTH).masked_fill(~triangle(), -math.inf)),
}  # fmt: skip


def results(run, tensors):
    """The output and the gradients, or the kind of error."""
    try:
        y = run(*tensors)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        return [y, *torch.autograd.grad(y, tensors, dy, allow_unused=True)]
    except Exception as error:
        return type(error)


@pytest.mark.quick(
    "output is written",
    "values alone learn",
    "keys are turned without gradients",
    "keys are repeated without gradients",
    "mask with a gradient",
    "hidden, then as float16",
    "truths that are added",
    "autocast",
    "multi-head attention",
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_computes(name, monkeypatch):
    run = PROGRAMS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(2, LENGTH, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    backend = Passes()
    torch._dynamo.reset()
    expected = results(run, tensors)
    with as_on_a_gpu(monkeypatch):
        found = results(torch.compile(run, backend=backend), tensors)
    rounding = 2e-2 if "autocast" in name else 2e-3 if "upcast" in name or "float16" in name else 2e-5
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding, equal_nan=True)
