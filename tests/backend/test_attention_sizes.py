"""Attention's masks where sizes or offsets are known at the call alone: lengths that change, caches that are longer
than what they hold, and prompts that come in pieces."""

import pytest
import torch
import torch.nn.functional as F

from te_inductor.passes.pre_grad.attention import masks
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.runtime.attention import predicate
from tests.attention import MASKS, Passes, as_on_a_gpu, assert_same, attention_with, operands

NAMES = {mask.__name__: mask for mask in MASKS}


@pytest.mark.quick("packed")
@pytest.mark.parametrize("name", ("window", "chunks", "prefix", "padded", "packed"))
def test_lengths_that_are_symbolic(name, monkeypatch):
    """One graph for all of them."""
    run, backend = attention_with(NAMES[name], scale=0.3), Passes()
    compiled = torch.compile(run, backend=backend)
    with as_on_a_gpu(monkeypatch):
        for length in (150, 131, 300):
            tensors, padding, documents = operands(length)
            for one, dim in (*((one, 2) for one in tensors), (padding, 1), (documents, 1)):
                torch._dynamo.mark_dynamic(one, dim)
            assert_same(run, compiled, tensors, padding, documents)
    assert [(site.mask, site.kernel) for site in backend.found] == [(MASKS[NAMES[name]], "flex_attention")]


def into_a_cache(q, k, v, held, keys, values):
    """Attends as with transformers' static cache: `held` tokens are in it, and it grows."""
    length = q.shape[2]
    mask = torch.arange(keys.shape[2])[None, :] <= (torch.arange(length) + held)[:, None]
    position = torch.arange(length) + held
    held.add_(length)
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def behind_what_is_held(q, k, v, held, keys, values):
    """Attends as with its dynamic cache: the mask's offset is a size."""
    offset = keys.shape[2]
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    mask = torch.arange(keys.shape[2])[None, :] <= (torch.arange(q.shape[2]) + offset)[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def written_before(q, k, v, held, keys, values):
    """What a mask reads is what was there then."""
    held.add_(3)
    queries = torch.arange(q.shape[2]) + held
    held.sub_(2)
    mask = (torch.arange(keys.shape[2])[None, :] <= queries[:, None]) & (torch.arange(keys.shape[2]) > held - 9)
    held.add_(50)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


CACHES = {  # the kernels of its graphs: for the first sizes, and for all others
    into_a_cache: ["flex_attention", "flex_attention"],
    behind_what_is_held: ["sdpa, is_causal", "flex_attention"],  # of which the first cache is empty
    written_before: ["flex_attention", "flex_attention"],
}


@pytest.mark.quick("behind_what_is_held", "written_before")
@pytest.mark.parametrize("run", CACHES, ids=lambda run: run.__name__)
def test_offsets_that_are_known_at_the_call(run, monkeypatch):
    backend = Passes()
    compiled = torch.compile(run, backend=backend)
    with as_on_a_gpu(monkeypatch), torch.no_grad():
        for length, held in ((60, 0), (40, 17), (50, 33)):
            drawn = torch.randn(5, 2, 4, 200, 16).unbind()
            size = held if run is behind_what_is_held else 180
            states = [[torch.tensor(held), *(one[:, :, :size].clone() for one in drawn[3:])] for _ in range(2)]
            q, k, v = (one[:, :, :length] for one in drawn[:3])
            found, expected = compiled(q, k, v, *states[0]), run(q, k, v, *states[1])
            assert (found - expected).norm() <= 1e-5 * expected.norm()
            assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    assert [site.kernel for site in backend.found] == CACHES[run]


@pytest.mark.parametrize("dynamic", (False, True))
def test_keys_behind_the_last_query_are_left_out(dynamic, monkeypatch):
    """The mask is that of a prompt in a cache that is longer: what is left is causal attention."""

    def run(q, k, v, fill):
        mask = torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None]
        mask = torch.where(mask, 0.0, fill)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    backend = Passes()
    compiled = torch.compile(run, backend=backend, dynamic=dynamic)
    for length in (40, 30):
        (q, k, v), _, _ = operands(90, groups=4)
        tensors = [q.detach()[:, :, :length].requires_grad_(), k, v]
        assert_same(run, compiled, tensors, float("-inf"))
    assert {site.kernel for site in backend.found} == {"sdpa, is_causal"}
    assert backend.graphs == 2 - dynamic


def test_queries_without_a_key_attend_to_all_keys_of_a_cache(monkeypatch):
    """The smallest number in each place is the mean of all values, also of those behind the last query."""

    def run(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        mask = torch.where((j <= i) & (j > 4), 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    backend = Passes()
    (q, k, v), _, _ = operands(90, groups=4)
    tensors = [q.detach()[:, :, :40].requires_grad_(), k, v]
    with as_on_a_gpu(monkeypatch):
        assert_same(run, torch.compile(run, backend=backend), tensors)
    assert [site.kernel for site in backend.found] == ["flex_attention"]


def test_one_attention_of_what_another_returns(monkeypatch):
    def run(q, k, v):
        i = torch.arange(q.shape[2])
        mask = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 9)
        once = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(once, once, v, attn_mask=mask)

    with as_on_a_gpu(monkeypatch):
        assert_same(run, torch.compile(run, backend=Passes()), operands(40, groups=4)[0])


def test_a_call_never_waits_to_learn_how_far_a_cache_is_filled():
    scores = masks.Scores(1, 1, 2048, 2048)
    reader = Reader(lambda node: False, lambda node: node)
    held = masks.sympy.Function("held", integer=True)(0)
    shifted = masks.of_predicate(masks.QUERY + held >= masks.KEY, scores, reader)
    assert shifted.name == "causal with an offset" and shifted.is_shifted_by_data


BORDERS = sorted({max(1, 128 * count + by) for count in range(33) for by in (-1, 0, 1)})  # 1 to 4097


@pytest.mark.parametrize("size", (1, 127, 128, 129, 300))
@pytest.mark.parametrize("kind", ("window", "chunks"))
def test_blocks_at_all_borders(kind, size):
    """Checks, for each length, what is known of a block by the numbers of its first and last query and key."""
    near = ["ge", "k", ["add", "q", 1 - size]] if kind == "window" else ["eq"] + [["floordiv", i, size] for i in "kq"]
    node = ["and", ["le", "k", "q"], near]
    for length in BORDERS:
        count = -(-length // 128)
        low = torch.arange(count) * 128
        high = (low + 127).clamp(max=length - 1)
        nearest, farthest = low[:, None] - high, high[:, None] - low  # the smallest and the largest of q - k
        some, every = farthest >= 0, nearest >= 0
        if kind == "window":
            some, every = some & (nearest < size), every & (farthest < size)
        else:
            some &= (low[:, None] // size <= high // size) & (low // size <= high[:, None] // size)
            every &= (low[:, None] // size == high // size) & (low // size == high[:, None] // size)
        is_whole = high - low == 127
        every &= is_whole[:, None] & is_whole
        found = predicate.block_mask(node, [], (1, 1, length, length), torch.device("cpu"))
        for (counts, chosen), expected in zip(
            zip(found[::2], found[1::2], strict=True), _turned(some, every), strict=True
        ):
            places = torch.arange(count) < counts[0, 0][:, None]
            listed = torch.zeros(count, count, dtype=torch.bool).scatter(1, chosen[0, 0].long(), places)
            assert torch.equal(listed, expected)


def _turned(some, every):
    in_part = some & ~every
    return in_part, every, in_part.mT, every.mT
