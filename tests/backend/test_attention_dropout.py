"""Attention with dropout to the keys that a padding keeps: the op, which on a CPU has a plain kernel, and the pass."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from te_inductor.ops.masked_attention import attend_to_kept
from te_inductor.passes.pre_grad.attention import sites
from te_inductor.runtime.attention.kept import rows_of_kept
from tests.attention import Passes, as_on_a_gpu, operands, padded, padded_both_ways, positions

SCALE = 0.3
KEPT = {
    "in front and behind": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]],
    "holes": [[1, 0, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 0, 0]],
    "all": [[1] * 7, [1] * 7],
    "none of one": [[0] * 7, [1, 1, 0, 1, 1, 1, 1]],
}


def attend(q, k, v, kept, dropout, seed=0):
    """Attends by the op, each time with the same random numbers."""
    sizes = (*q.shape[:3], k.shape[2])
    rows = rows_of_kept(["ne", ["at", 0, "b", "k"], 0], [kept], sizes, q.device)
    torch.manual_seed(seed)
    return attend_to_kept(q, k, v, *rows, dropout, SCALE)


def made(queries=5, keys=7):
    shapes = (2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 3)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", KEPT)
def test_without_dropout_it_is_torchs(name):
    kept = torch.tensor(KEPT[name])
    q, k, v = made()
    with torch.no_grad():
        for one in (k, v):
            one.transpose(1, 2)[kept == 0] = torch.nan  # which nobody reads
    y = attend(q, k, v, kept, 0.0)
    clean = [one.detach().nan_to_num(0.0).requires_grad_() for one in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *clean, attn_mask=kept.bool()[:, None, None], scale=SCALE, enable_gqa=True
    ).nan_to_num(0.0)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (q, k, v), dy)
    for one, other in zip((y, *gradients), (expected, *torch.autograd.grad(expected, clean, dy)), strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0.0))


@pytest.mark.quick("in front and behind", "none of one")
@pytest.mark.parametrize("name", KEPT)
def test_its_gradient_drops_what_its_output_does(name):
    kept = torch.tensor(KEPT[name])
    assert torch.autograd.gradcheck(lambda *given: attend(*given, kept, 0.4), made(), fast_mode=True)


def test_what_it_drops():
    """A share of the weights, another with each seed; the others are larger, so that the mean stays."""
    kept = torch.tensor(KEPT["holes"])
    q, k, v = (one.detach() for one in made())
    v = torch.ones_like(v)
    draws = torch.stack([attend(q, k, v, kept, 0.4, seed) for seed in range(400)])
    assert torch.equal(draws[7], attend(q, k, v, kept, 0.4, 7)) and not torch.equal(draws[7], draws[8])
    # The mean of 400 draws of a sum of weights, whose deviation is below one.
    assert (draws.mean(0) - 1).abs().max() < 5 / 400**0.5
    assert draws.var(0).min() > 0.1


def padded_with_dropout(mask, dropout):
    def run(q, k, v, padding, documents):
        keep = mask(*positions(q.shape[2], k.shape[2], q.device), padding, documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout, scale=SCALE)

    return run


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint(reentrant, monkeypatch):
    """What is computed again has to drop what was dropped. As weights drop what they drop, the output is linear in v."""
    backend, (tensors, padding, documents) = Passes(traced=True), operands(150, groups=4)
    run = padded_with_dropout(padded_both_ways, 0.4)
    monkeypatch.setattr(sites, "DROPOUT_QUERIES", 1)

    def checkpointed(*given):
        return torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=reentrant)

    with as_on_a_gpu(monkeypatch):
        y = torch.compile(checkpointed, backend=backend)(*tensors, padding, documents)
        [dv] = torch.autograd.grad(y.square().sum() / 2, tensors[2:])
    [site] = backend.found
    assert site.kernel == sites.KERNELS["kept"]
    torch.testing.assert_close((dv * tensors[2]).sum(), y.square().sum(), rtol=1e-4, atol=0.0)


def test_the_pass(monkeypatch):
    """A padding alone, from the measured number of queries on."""
    backend, rare = Passes(), 1e-12
    tensors, padding, documents = operands(150, groups=4)
    run = padded_with_dropout(padded_both_ways, rare)
    compiled = torch.compile(run, backend=backend)
    with as_on_a_gpu(monkeypatch):
        y = compiled(*tensors, padding, documents)
        found = [y, *torch.autograd.grad(y.square().sum(), tensors)]
        torch.compile(padded_with_dropout(padded, 0.2), backend=backend)(*tensors, padding, documents)
        monkeypatch.setattr(sites, "DROPOUT_QUERIES", 512)
        torch._dynamo.reset()
        torch.compile(padded_with_dropout(padded_both_ways, 0.2), backend=backend)(*tensors, padding, documents)
    wide = [one.detach().double().requires_grad_() for one in tensors]
    expected = padded_with_dropout(padded_both_ways, 0.0)(*wide, padding, documents)
    for one, other in zip(found, [expected, *torch.autograd.grad(expected.square().sum(), wide)], strict=True):
        assert (one.double() - other).norm() <= 1e-5 * other.norm()
    kernels = [site.kernel for site in backend.found]
    assert kernels == [sites.KERNELS["kept"], "sdpa, the mask as a tensor", "sdpa, the mask as a tensor"]
    assert "no mask but a padding" in backend.found[1].reason and "fewer than 512 queries" in backend.found[2].reason
