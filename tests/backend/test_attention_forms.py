"""Forms in which models write attention by hand: of three dimensions, in place, with keys that lie turned or have one
head, values of another width; and masks with an `or` of what a batch says."""

import pytest
import torch
import torch.nn.functional as F

from tests.attention import Passes, as_on_a_gpu, assert_same, positions
from tests.attention_bias import SLOPES

LENGTH, HEADS = 45, 4


def keeps(q, k, padding):
    i, j, b = positions(q.shape[-2], k.shape[-2], q.device)
    return (j <= i) & padding.bool()[b, j]


def lowest(q):
    return torch.finfo(q.dtype).min


def numbers(keep, q):
    return torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, lowest(q))


def merged(*tensors):
    return [one.reshape(-1, *one.shape[2:]) for one in tensors]


def bloom(q, k, v, padding):
    added = numbers(keeps(q, k, padding), q)
    alibi = (SLOPES.to(q)[:, None] * torch.arange(k.shape[2])).expand(2, 4, -1).reshape(8, 1, -1)
    q, k, v = merged(q, k, v)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.7, alpha=0.25)
    weights = F.softmax(scores.view(2, 4, LENGTH, -1) + added, dim=-1, dtype=torch.float64).to(q.dtype)
    y = torch.bmm(weights.view(8, LENGTH, -1), v)
    return y.view(2, 4, LENGTH, -1).permute(0, 2, 1, 3).reshape(2, LENGTH, -1)


def japanese_neox(q, k, v, padding):
    added = numbers(keeps(q, k, padding), q)
    flat_q, flat_k = merged(q, k)
    scores = torch.baddbmm(flat_q.new_zeros(8, LENGTH, LENGTH), flat_q, flat_k.transpose(1, 2), beta=1.0, alpha=0.25)
    return F.softmax(scores.view(2, 4, LENGTH, -1) + added, dim=-1) @ v


def three_dimensions(q, k, v, padding):
    """The scores of XGLM and FSMT are four dimensions for the mask alone."""
    keep = keeps(q, k, padding)
    q, k, v = merged(q, k, v)
    scores = torch.bmm(q, k.transpose(1, 2)).view(2, 4, LENGTH, LENGTH).masked_fill(~keep, lowest(q))
    weights = F.softmax(scores.view(8, LENGTH, LENGTH), dim=-1)
    weights = weights.view(2, 4, LENGTH, LENGTH).view(8, LENGTH, LENGTH)
    return torch.bmm(F.dropout(weights, p=0.1, training=False), v)


def without_heads(q, k, v, padding):
    q, k, v = (one[:, 0] for one in (q, k, v))
    keep = keeps(q, k, padding)[:, 0]
    return F.softmax((q @ k.mT).masked_fill(~keep, lowest(q)), -1) @ v


def falcon(q, k, v, padding):
    scores = q @ k.transpose(-1, -2)
    scores /= 4.0
    scores += numbers(keeps(q, k, padding), q)
    return F.softmax(scores, dim=-1) @ v


def falcon_with_alibi(q, k, v, padding):
    alibi = (SLOPES.to(q)[:, None] * torch.arange(k.shape[2])).expand(2, 4, -1).reshape(8, 1, -1)
    scores = q @ k.transpose(-1, -2) + alibi.view(2, 4, 1, -1)
    scores *= 0.25
    return F.softmax(scores + numbers(keeps(q, k, padding), q), dim=-1) @ v


def xlm(q, k, v, padding):
    scores = torch.matmul(q / 4.0, k.transpose(2, 3))
    scores.masked_fill_((padding == 0)[:, None, None].expand_as(scores), lowest(q))
    return F.softmax(scores.double(), dim=-1).type_as(scores) @ v


def codegen(q, k, v, padding):
    """The mask's numbers are divided with the scores."""
    return F.softmax((q @ k.mT + numbers(keeps(q, k, padding), q)) / 4.0, dim=-1) @ v


def openai(q, k, v, padding):
    """Keys lie turned."""
    turned = k.transpose(1, 2).contiguous().permute(0, 2, 3, 1)
    return F.softmax(torch.matmul(q, turned).masked_fill(~keeps(q, k, padding), lowest(q)), dim=-1) @ v


def one_head_of_keys(q, k, v, padding):
    scores = (q @ k[:, :1].mT).masked_fill(~keeps(q, k, padding), lowest(q))
    return F.softmax(scores, dim=-1) @ v[:, :1]


def wide_queries(q, k, v, padding):
    """Latent attention has queries and keys that are wider than values."""
    q, k = (torch.cat([one, one[..., :8] * 0.5], -1) for one in (q, k))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keeps(q, k, padding))


def wide_queries_by_hand(q, k, v, padding):
    q, k = (torch.cat([one, one[..., :8] * 0.5], -1) for one in (q, k))
    return F.softmax((q @ k.mT).masked_fill(~keeps(q, k, padding), lowest(q)), dim=-1) @ v


def prefix_of_each_sequence(q, k, v, padding):
    i, j, b = positions(LENGTH, LENGTH, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) | (j < padding.sum(-1)[b] // 2))


def images(q, k, v, padding):
    """Tokens of one image attend to each other, as in Gemma 3."""
    i, j, b = positions(LENGTH, LENGTH, q.device)
    is_image = torch.arange(LENGTH) % 11 < 4
    groups = torch.where(is_image & padding.bool(), torch.arange(LENGTH) // 11, -1)
    same = (groups[b, i] == groups[b, j]) & (groups[b, i] >= 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=((j <= i) | same) & (padding.bool()[b, j] | (i == j)))


def mask_of_zeros_beside(q, k, v, padding):
    """T5 without a table adds zeros to the mask."""
    added = torch.zeros(1, 4, LENGTH, LENGTH, dtype=q.dtype) + numbers(keeps(q, k, padding), q)
    return F.softmax(q @ k.mT + added, dim=-1) @ v


def neo(q, k, v, padding, window=LENGTH):
    """GPT-Neo puts one mask in the place of scores and adds another; what both hide is minus infinity."""
    i, j, _ = positions(LENGTH, LENGTH, q.device)
    smallest = torch.tensor(lowest(q), dtype=q.dtype)
    scores = torch.where((j <= i) & (j > i - window), q @ k.mT, smallest)
    return F.softmax(scores + numbers(keeps(q, k, padding), q), dim=-1) @ v


def neo_near(q, k, v, padding):
    return neo(q, k, v, padding, 8)


def two_masks_added(q, k, v, padding):
    i, j, _ = positions(LENGTH, LENGTH, q.device)
    scores = q @ k.mT + numbers(padding.bool()[:, None, None], q)
    return F.softmax(scores + numbers(j <= i, q), dim=-1) @ v


FORMS = {
    bloom: "causal, padded, bias",
    japanese_neox: "causal, padded",
    three_dimensions: "causal, padded",
    without_heads: "causal, padded",
    falcon: "causal, padded",
    falcon_with_alibi: "causal, padded, bias",
    xlm: "padded",
    codegen: "causal, padded",
    openai: "causal, padded",
    one_head_of_keys: "causal, padded",
    wide_queries: "causal, padded",
    wide_queries_by_hand: "causal, padded",
    prefix_of_each_sequence: "data",
    images: "data",
    mask_of_zeros_beside: "causal, padded",
    neo: "causal, padded",
    neo_near: "causal, window, padded",
    two_masks_added: "causal, padded",
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form(form, monkeypatch):
    torch.manual_seed(0)
    tensors = [torch.randn(2, LENGTH, HEADS, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0, :5], padding[1, 40:] = 0, 0
    backend = Passes()
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        assert_same(form, torch.compile(form, backend=backend), tensors, padding)
    assert [(site.mask, site.kernel, site.reason) for site in backend.found] == [(FORMS[form], "flex_attention", None)]
