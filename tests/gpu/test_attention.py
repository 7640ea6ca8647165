"""Attention by proven masks on a GPU: every class of mask against float64, and the choice that a batch makes."""

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_inductor import explain
from te_inductor.ops.masked_attention import attend_to_kept
from te_inductor.passes.pre_grad.attention import sites
from te_inductor.runtime.attention.kept import rows_of_kept
from tests.attention import MASKS, attention_with, by_hand, operands, packed, padded, padded_both_ways, window
from tests.attention_bias import BIASES, program, relative
from tests.attention_bias import MASKS as BIAS_MASKS

pytestmark = pytest.mark.gpu
NAMES = {mask.__name__: mask for mask in MASKS}


def gradients(run, tensors, dy, *more):
    y = run(*tensors[:3], *more, *tensors[3:])
    return [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


def assert_as_close(run, tensors, *more, **options):
    """Checks that a run is as close to float64 as the program is, twice over: another order of sums."""
    wide = [one.detach().double().requires_grad_() for one in tensors]
    dy = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], device="cuda").bfloat16()
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(run, wide, dy, *more)
    written = gradients(run, tensors, dy, *more)
    torch._dynamo.reset()
    found = gradients(torch.compile(run, backend="te", options=options), tensors, dy, *more)
    for one, other, right in zip(found, written, expected, strict=True):
        error, bound = ((each.double() - right).norm() for each in (one, other))
        assert error <= 2 * bound + 1e-3 * right.norm(), (error / right.norm(), bound / right.norm())


def made(length, **more):
    return operands(length, device="cuda", dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("length", (512, 1000, 1537))
@pytest.mark.parametrize("name", NAMES)
def test_every_mask(name, length):
    tensors, padding, documents = made(length, width=64)
    assert_as_close(attention_with(NAMES[name]), tensors, padding, documents)


@pytest.mark.parametrize("width", (64, 96, 128, 256))
@pytest.mark.parametrize("mask", (window, padded), ids=lambda mask: mask.__name__)
def test_every_width(mask, width):
    tensors, padding, documents = made(1024, width=width, heads=4, groups=1)
    assert_as_close(attention_with(mask), tensors, padding, documents)


@pytest.mark.parametrize("graphs", (False, True))
@pytest.mark.parametrize("mask", (padded, padded_both_ways), ids=lambda mask: mask.__name__)
def test_what_a_batch_hides(mask, graphs):
    """One program for batches with padding and without, by cuDNN and by FlexAttention."""
    run = attention_with(mask)
    tensors, padding, documents = made(1024, width=128, heads=8)
    options = {"triton.cudagraphs": True} if graphs else {}
    [site] = explain(run, *tensors, padding, documents, options=options).attention
    assert site.kernel == ("flex_attention" if graphs else "sdpa where the mask hides nothing, else flex_attention")
    compiled = torch.compile(run, backend="te", options=options)
    for hidden in (padding, torch.ones_like(padding), padding.flip(0), torch.ones_like(padding)):
        wide = [one.detach().double().requires_grad_() for one in tensors]
        dy = torch.randn(2, 8, 1024, 128, device="cuda").bfloat16()
        with sdpa_kernel(SDPBackend.MATH):
            expected = gradients(run, wide, dy, hidden, documents)
        for one, right in zip(gradients(compiled, tensors, dy, hidden, documents), expected, strict=True):
            assert (one.double() - right).norm() <= 8e-3 * right.norm()  # a few roundings of bf16


HAND = {
    "plain": by_hand(window),
    "cap": by_hand(padded, softcap=5.0),
    "sinks": by_hand(padded, sinks=True),
    "packed": by_hand(packed, form="fill"),
}


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name):
    tensors, padding, documents = made(1000, width=64)
    sinks = [torch.randn(4, device="cuda", dtype=torch.bfloat16, requires_grad=True)] if name == "sinks" else []
    [site] = explain(HAND[name], *tensors, padding, documents, *sinks).attention
    assert site.reason is None
    assert_as_close(HAND[name], [*tensors, *sinks], padding, documents)


@pytest.mark.parametrize("mask", BIAS_MASKS)
@pytest.mark.parametrize("how", ("added", "filled", "sdpa", "sdpa, filled"))
@pytest.mark.parametrize("bias", BIASES, ids=lambda one: one.__name__)
def test_a_bias(bias, how, mask, monkeypatch):
    """Compares outputs and gradients, also that of a learned bias."""
    monkeypatch.setattr(sites, "BIAS_QUERIES", 512)
    tensors, padding, documents = made(640, width=64, groups=4)
    learned = torch.randn(11, 4, device="cuda", dtype=torch.bfloat16, requires_grad=bias is relative)
    run = program(bias, mask, how)
    if bias is relative:
        [site] = explain(run, *tensors, padding, documents, learned).attention
        assert_as_close(run, [*tensors, learned], padding, documents)
    else:

        def fixed(q, k, v, padding, documents):
            return run(q, k, v, padding, documents, None)

        [site] = explain(fixed, *tensors, padding, documents).attention
        assert_as_close(fixed, tensors, padding, documents)
    assert site.kernel == "flex_attention"


@pytest.mark.parametrize("padded", (False, True))
def test_blocks_that_are_compiled_one_by_one(padded):
    """The mask is an input of each: compared once for all of them."""

    def block(q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="te")
    tensors, padding, _ = made(1024, width=64, groups=4)
    for _ in range(2):
        mask = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").tril().expand(2, 1, -1, -1)
        mask = mask & padding.bool()[:, None, None] if padded else mask
        [site] = explain(block, *tensors, mask).attention
        assert site.kernel == ("flex_attention" if padded else "sdpa, is_causal")
        dy = torch.randn_like(tensors[0])
        expected = gradients(block, [one.detach().double().requires_grad_() for one in tensors], dy, mask)
        for one, right in zip(gradients(compiled, tensors, dy, mask), expected, strict=True):
            assert (one.double() - right).norm() <= 8e-3 * right.norm()  # a few roundings of bf16


def test_nothing_that_is_hidden_spreads():
    """Keys and values behind the end of a batch, of which no block is computed, may hold anything."""
    tensors, padding, documents = made(1024, width=64)
    padding[:] = 1
    padding[:, 512:] = 0
    run = attention_with(padded)
    expected = run(*tensors, padding, documents)[:, :, :512]
    with torch.no_grad():
        tensors[1][:, :, 512:], tensors[2][:, :, 512:] = torch.nan, torch.inf
    found = torch.compile(run, backend="te")(*tensors, padding, documents)[:, :, :512]
    assert (found - expected).norm() <= 8e-3 * expected.norm()


def attend(q, k, v, kept, dropout, seed=0):
    """Attends to the keys that are kept, each time with the same random numbers."""
    rows = rows_of_kept(["ne", ["at", 0, "b", "k"], 0], [kept], (*q.shape[:3], k.shape[2]), q.device)
    torch.manual_seed(seed)
    return attend_to_kept(q, k, v, *rows, dropout, 0.2)


def weighed(q, k, v, kept, drops):
    """The same with known factors of the weights, in float64; zeros where nothing is kept."""
    scores = (q @ k.mT * 0.2).masked_fill(~kept[:, None, None], -torch.inf)
    return torch.where(kept.any(-1)[:, None, None, None], scores, 0.0).softmax(-1) * drops @ v


@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("queries", (130, 512))
def test_dropout_under_a_padding(queries, width, dropout):
    """The result is compared with float64, with the weights that the kernel has dropped: values that are unit vectors
    show them."""
    torch.manual_seed(1)
    shapes = [(4, 2, length, width) for length in (queries, 64, 64)]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    kept = torch.rand(4, 64, device="cuda") > 0.4
    kept[1], kept[2] = True, False
    q, k, v = tensors
    unit = torch.eye(64, width, device="cuda", dtype=torch.bfloat16).expand_as(v)
    with torch.no_grad():
        shown = attend(q, k, unit, kept, dropout)[..., :64]
        assert torch.equal(shown, attend(q, k, unit, kept, dropout)[..., :64])
        if dropout:
            assert not torch.equal(shown, attend(q, k, unit, kept, dropout, 1)[..., :64])
    inside = kept[:, None, None].expand_as(shown)
    assert not shown[~inside].any()
    drops = (shown != 0).double() / (1 - dropout)
    assert abs((shown[inside] != 0).double().mean() - (1 - dropout)) < 0.02
    dy = torch.randn_like(q)
    found = gradients(lambda *given: attend(*given, kept, dropout), tensors, dy)
    wide = [one.detach().double().requires_grad_() for one in tensors]
    expected = gradients(lambda *given: weighed(*given, kept, drops), wide, dy)
    for one, right in zip(found, expected, strict=True):
        assert (one.double() - right).norm() <= 8e-3 * right.norm()  # a few roundings of bf16


def with_dropout(q, k, v, kept):
    mask = kept[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3, scale=0.2)


def two_blocks(block, checkpointed=torch.utils.checkpoint.checkpoint, **more):
    """Attention of what attention returns, each computed again by the backward."""

    def run(q, k, v, kept):
        first = checkpointed(block, q, k, v, kept, **more)
        return first, checkpointed(block, first, k, v, kept, **more)

    return run


def showing(monkeypatch):
    """Operands of which a half of v's columns are unit vectors, so that outputs show which weights were dropped."""
    monkeypatch.setattr(sites, "DROPOUT_QUERIES", 1)
    torch._dynamo.reset()
    torch.manual_seed(1)
    q, k, v = (torch.randn(4, 2, length, 128, device="cuda", dtype=torch.bfloat16) for length in (130, 64, 64))
    v[..., :64] = torch.eye(64, device="cuda")
    kept = torch.rand(4, 64, device="cuda") > 0.4
    kept[1], kept[2] = True, False
    return [one.requires_grad_() for one in (q, k, v)], kept


@pytest.mark.parametrize("how", ("plain", "reentrant", "states that are saved", "cuda graphs"))
def test_a_checkpoint_drops_again_what_it_dropped(how, monkeypatch):
    """The gradients are those of the weights that the forward of the same call has dropped, also where another call comes
    between it and its backward."""
    tensors, kept = showing(monkeypatch)
    run = two_blocks(with_dropout, use_reentrant=how == "reentrant")
    options = {"triton.cudagraphs": True} if how == "cuda graphs" else {}
    found = explain(run, *tensors, kept, options=options).attention
    assert [site.kernel for site in found] == [sites.KERNELS["kept"]] * 2
    with torch._functorch.config.patch(graphsafe_rng_functionalization=how != "states that are saved"):
        compiled = torch.compile(run, backend="te", options=options)
        for order in ((0,), (0,), (0, 1), (1, 0)) if how != "cuda graphs" else ((0,),) * 4:
            calls = [compiled(*tensors, kept) for _ in order]
            shown = [[one.detach().clone() for one in call] for call in calls]
            for place in order:
                dy = torch.randn_like(shown[place][1])
                gradients = torch.autograd.grad(calls[place][1], tensors, dy)
                assert_of_shown(tensors, kept, shown[place], dy, gradients)


def assert_of_shown(tensors, kept, shown, dy, found):
    drops = [(one[..., :64] != 0).double() / 0.7 for one in shown]
    for one in drops:
        inside = kept[:, None, None].expand_as(one)
        assert abs((one[inside] != 0).double().mean() - 0.7) < 0.02
    assert not torch.equal(*drops)
    wide = [one.detach().double().requires_grad_() for one in tensors]
    q, k, v = wide
    y = weighed(weighed(q, k, v, kept, drops[0]), k, v, kept, drops[1])
    for one, right in zip(found, torch.autograd.grad(y, wide, dy.double()), strict=True):
        assert (one.double() - right).norm() <= 1.5e-2 * right.norm()  # roundings of bf16, of two layers


@pytest.mark.parametrize("outside", (False, True))
def test_a_checkpoint_drops_again_as_without_one(outside, monkeypatch):
    """Gradients are those of the program without a checkpoint, with the same seed; also where the checkpoint is outside of
    what is compiled."""
    tensors, kept = showing(monkeypatch)
    dy = torch.randn_like(tensors[0])
    results = []
    # Each random operation of a checkpoint has a generator of its own by default, which no seed reaches.
    with torch._functorch.config.patch(graphsafe_rng_functionalization=False):
        plain = torch.compile(two_blocks(with_dropout, lambda run, *given: run(*given)), backend="te")
        block = torch.compile(with_dropout, backend="te") if outside else with_dropout
        again = two_blocks(block, use_reentrant=False)
        for run in (plain, again if outside else torch.compile(again, backend="te")):
            for _ in range(2):  # of which the first compiles
                torch.manual_seed(5)
                first, y = run(*tensors, kept)
                made = [first, y, *torch.autograd.grad(y, tensors, dy)]
            results.append(made)
    (*outputs, dq, dk, dv), (*others, dq_again, dk_again, dv_again) = results
    assert all(map(torch.equal, outputs, others))
    for one, other in ((dq, dq_again), (dk, dk_again), (dv, dv_again)):
        assert (one - other).norm() <= 1e-3 * other.norm()  # its sums are in no order


def test_dropout_in_a_graph():
    """The mean over seeds is attention without dropout, in a graph that Inductor compiles."""
    torch._dynamo.reset()
    tensors, padding, _ = made(512, width=64, groups=4)

    def run(q, k, v, padding, dropout=0.2):
        keep = padding.bool()[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout)

    [site] = explain(run, *tensors, padding).attention
    assert site.kernel == sites.KERNELS["kept"]
    compiled = torch.compile(run, backend="te")
    dy = torch.randn_like(tensors[0])
    draws = [[one.float() for one in gradients(compiled, tensors, dy, padding)] for _ in range(200)]
    means = [torch.stack(each).mean(0) for each in zip(*draws, strict=True)]
    wide = [one.detach().double().requires_grad_() for one in tensors]
    expected = gradients(lambda *given: run(*given, dropout=0.0), wide, dy, padding)
    for one, right in zip(means, expected, strict=True):
        # The deviation of a draw is about that of its dropout, 0.5, of the mean of 200 a fourteenth of that.
        assert (one.double() - right).norm() <= 0.1 * right.norm()
