"""Attention that asks at each call whether a padding hides anything: what it asks and computes, once for all layers, and
what comes of it. Its two kernels stand in as plain products, which a CPU has."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from te_inductor.passes.pre_grad.attention import sites
from te_inductor.runtime.attention import masked, predicate
from tests.attention import Passes, assert_same, operands, padded, padded_both_ways, positions

LENGTH = 150


def without_mask(q, k, v, *_, scale):
    """Attention in the place of cuDNN's; the seventh argument says whether it is causal."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if _[3]:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), scores.logsumexp(-1, keepdim=True)


def without_mask_backward(dy, q, k, v, *rest, scale):
    with torch.enable_grad():
        learns = [one.detach().requires_grad_() for one in (q, k, v)]
        y, _ = without_mask(*learns, None, True, 0.0, rest[-1], scale=scale)
        return torch.autograd.grad(y, learns, dy)


def _listed(counts, blocks):
    places = torch.arange(blocks.shape[-1]) < counts[..., None]
    return torch.zeros(blocks.shape, dtype=torch.bool).scatter(-1, blocks.long(), places)


def by_blocks(text, scale, *_):
    """FlexAttention in the place of the compiled one: the scores of blocks that are not listed are hidden too."""

    def attend(q, k, v, mask):
        sizes = (*q.shape[:3], k.shape[2])
        b, h, i, j = (
            torch.arange(size).view([-1 if at == dim else 1 for at in range(4)]) for dim, size in enumerate(sizes)
        )
        listed = _listed(mask.kv_num_blocks, mask.kv_indices) | _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        keep = mask.mask_mod(b, h, i, j) & listed[:, :, i // predicate.BLOCK, j // predicate.BLOCK][:, :, 0, 0]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale, enable_gqa=True)

    return attend


@pytest.fixture
def counted(monkeypatch):
    """How often a call asks what its batch hides, and computes a block mask."""
    counts = dict.fromkeys(("holds_everywhere", "block_mask"), 0)

    def counting(name, compute):
        def count(*given):
            counts[name] += not isinstance(given[1][0], torch._subclasses.FakeTensor)
            return compute(*given)

        return count

    for name in counts:
        monkeypatch.setattr(predicate, name, counting(name, getattr(predicate, name)))
    kernels = {
        "_scaled_dot_product_cudnn_attention": without_mask,
        "_scaled_dot_product_cudnn_attention_backward": without_mask_backward,
    }
    monkeypatch.setattr(masked, "aten", SimpleNamespace(**kernels))
    monkeypatch.setattr(masked, "_compiled", by_blocks)
    monkeypatch.setattr(sites, "_is_on_a_gpu", lambda site: True)
    for name in ("FLEX_QUERIES", "WAIT_QUERIES"):
        monkeypatch.setattr(sites, name, 1)
    torch._dynamo.reset()
    return counts


def layers(q, k, v, padding, documents, within=lambda run, *given: run(*given)):
    """Two layers of one mask, and one of another whose padding is the same."""

    def layer(x, keep):
        return x + F.scaled_dot_product_attention(x, k, v, attn_mask=keep, scale=0.3, enable_gqa=True)

    torch._check(q.shape[2] == k.shape[2])  # as of what one tensor is projected to

    keep, both = (
        mask(*positions(q.shape[2], k.shape[2], q.device), padding, documents) for mask in (padded, padded_both_ways)
    )
    return within(layer, within(layer, within(layer, q, keep), keep), both)


PROGRAMS = {
    "plain": layers,
    "checkpointed": partial(layers, within=partial(checkpoint, use_reentrant=False)),
}


@pytest.mark.quick("checkpointed")
@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_ask_and_compute_once(name, counted):
    """They compute a block mask of each predicate where the batch hides something, and none where it hides nothing; so it
    is in the program of one length, and in that of all others."""
    run, backend = PROGRAMS[name], Passes()
    compiled = torch.compile(run, backend=backend)
    for length in (LENGTH, 131, 300):
        tensors, padding, documents = operands(length)
        for hidden in (padding, torch.ones_like(padding)):
            before = dict(counted)
            assert_same(run, compiled, tensors, hidden, documents)
            asked, computed = (counted[key] - before[key] for key in ("holds_everywhere", "block_mask"))
            assert (asked, computed) == (1, 0 if hidden.all() else 2)
    assert [site.kernel for site in backend.found] == [sites.KERNELS["either"]] * 6 and backend.graphs == 2


def test_memory_of_a_block_mask():
    """A graph is compiled for one, whether or not it is computed."""
    for node in (["le", "k", "q"], ["ne", ["at", 0, "b", "k"], 0], ["eq", "h", ["floordiv", "q", 3]]):
        for sizes in ((2, 3, 700, 500), (1, 1, 1, 129)):
            padding = torch.ones(sizes[0], sizes[3], dtype=torch.int64)
            found = predicate.block_mask(node, [padding], sizes, padding.device)
            expected = predicate.empty_block_mask(node, sizes, padding.device)
            for one, other in zip(found, expected, strict=True):
                assert one.contiguous().stride() == other.stride() and one.dtype is other.dtype
                assert one.shape == other.shape


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_predicates_than_dynamo_compiles_of_one_function(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    (q, k, v), padding, _ = operands(LENGTH)
    q, k, v = (one.detach() for one in (q, k, v))
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & padding.bool()[:, None, None]
    expected = F.scaled_dot_product_attention(q, k, v, keep, scale=0.3, enable_gqa=True)
    masked._compiled.cache_clear()
    for times in (1, 2, 3):
        node = ["and", ["le", "k", "q"], *[["ne", ["at", 0, "b", "k"], 0]] * times]
        blocks = predicate.block_mask(node, [padding], (*q.shape[:3], LENGTH), q.device)
        found = masked._flex(q, k, v, [padding], blocks, predicate.to_text(node), 0.3)
        torch.testing.assert_close(found, expected)
    masked._compiled.cache_clear()
