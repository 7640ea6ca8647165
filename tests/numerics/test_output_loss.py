"""Losses of output layers in chunks: numbers, against float64 and against torch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from te_inductor.recipes.losses import Loss, SharedWords
from te_inductor.runtime.eager import losses as eager
from tests.losses import IGNORED, error, gradients, losses_of, operands, reference, reference_logits, results_of

PLAIN = Loss(IGNORED)
CAPPED = Loss(IGNORED, smoothing=0.1, inner=1 / 3, outer=3.0)
# bf16 rounds dx, dw and their factors: 3 roundings of 2**-9 at most each. Casts to E4M3 are off by up to 2**-4, 0.026 as
# the root of the mean square, to E5M2 by twice as much. So a product of both is off by 0.058, one of two E4M3, as the
# logits are, by 0.037, which dy inherits: 0.069 together.
BOUNDS = {"none": 3 * 2**-9, "current": 0.075, "delayed": 0.075, "rowwise": 0.075, "block": 0.075}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_BYTES", 2**16)
    torch.manual_seed(0)


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize(
    ("tokens", "width", "words", "loss", "bias"),
    [(300, 64, 256, PLAIN, False), (129, 48, 1000, CAPPED, True), (2, 16, 17, PLAIN, True), (5, 64, 16, CAPPED, False)],
)
def test_losses_and_gradients_are_those_of_float64(recipe, tokens, width, words, loss, bias):
    """There are several chunks, the last of fewer tokens; gradients of losses that differ from token to token."""
    given, factors = operands(tokens, width, words, torch.bfloat16, bias=bias), torch.rand(tokens) + 0.5
    found, found_gradients = gradients(partial(losses_of, recipe, loss=loss), given, factors)
    wanted, wanted_gradients = gradients(partial(reference, loss=loss), given, factors)
    assert (found - wanted).abs().max() <= 2 * BOUNDS[recipe]  # of logits of size one; the largest of all tokens
    assert found[given[3] == IGNORED].eq(0).all()
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        assert error(one, other) <= BOUNDS[recipe]


@pytest.mark.parametrize("recipe", ["none", "current", "rowwise", "block"])
@pytest.mark.parametrize(("loss", "bias"), [(PLAIN, False), (replace(CAPPED, smoothing=0.0), True)])
@pytest.mark.parametrize("parts", [(1.0, 0.02), (1.0, 1.0), (0.0, 1.0)])
def test_sums_and_their_gradients_are_those_of_float64(recipe, loss, bias, parts):
    """Gradients of sums that are small beside those of losses, as large, and alone; tokens without a label have one."""
    given, factors = operands(300, 64, 256, torch.bfloat16, bias=bias), (torch.rand(300) + 0.5, torch.rand(300) - 0.3)

    def weighed(results, like):
        return sum(
            (part * one.to(like) * factor.to(like)).sum()
            for part, one, factor in zip(parts, results, factors, strict=True)
        )

    def found(*given):
        return weighed(results_of(recipe, *given, replace(loss, sums=True)), torch.float32)

    def wanted(*given):
        sums = reference_logits(*given[:3], loss).logsumexp(1)
        return weighed((reference(*given, loss), sums), torch.float64)

    (value, found_gradients), (exact, wanted_gradients) = (
        gradients(run, given, torch.ones(())) for run in (found, wanted)
    )
    assert abs(value - exact) <= BOUNDS[recipe] * 300**0.5  # as errors of tokens, of logits of size one, add up
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        assert error(one, other) <= BOUNDS[recipe]


@pytest.mark.parametrize("recipe", ["none", "current", "rowwise", "block"])
def test_chunks_change_no_bit(recipe, monkeypatch):
    given, factors = operands(384, 32, 64, torch.bfloat16), torch.rand(384)
    found = []
    for size in (2**14, 2**15, 2**30):
        monkeypatch.setattr(eager, "CHUNK_BYTES", size)
        losses, grads = gradients(partial(losses_of, recipe, loss=PLAIN), given, factors)
        found.append((losses, *grads))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_ranks_that_share_words_have_chunks_as_often(monkeypatch):
    """Ranks that have fewer words could compute more tokens at a time."""
    monkeypatch.setattr(eager, "CHUNK_BYTES", 2 * eager.ROWS * 2 * 201 - 1)
    loss = replace(PLAIN, shared=SharedWords("group", 2, 401))
    of_ranks = [list(eager.chunks(4096, words, loss, 2)) for words in (201, 200)]
    assert of_ranks[0] == of_ranks[1] and len(of_ranks[0]) == 32


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_tokens_without_a_label(recipe):
    """All are ignored: a mean is 0 / 0, and its gradient zero, as torch has it."""
    x, weight, _, labels = operands(8, 16, 32, torch.bfloat16)
    labels[:] = IGNORED

    def mean(x, weight, bias, labels):
        return losses_of(recipe, x, weight, bias, labels, PLAIN).sum() / (labels != IGNORED).sum()

    found, grads = gradients(mean, (x, weight, None, labels), torch.ones(()))
    wanted, wanted_grads = gradients(
        lambda x, weight, bias, labels: F.cross_entropy(F.linear(x, weight), labels),
        (x, weight, None, labels),
        torch.ones(()),
    )
    assert found.isnan() and wanted.isnan()
    assert all(one.eq(0).all() and other.eq(0).all() for one, other in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "rowwise"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(recipe, value):
    """A value of x that is not finite shows in the loss and in both gradients, where a loss scaler looks."""
    given = operands(16, 32, 64, torch.bfloat16)
    given[0][1, 3] = value
    found, grads = gradients(partial(losses_of, recipe, loss=PLAIN), given, torch.ones(16))
    assert not found[1].isfinite()
    assert all(not one.isfinite().all() for one in grads)


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_a_label_outside_of_the_vocabulary_is_an_error(recipe):
    x, weight, _, labels = operands(4, 16, 32, torch.bfloat16)
    labels[0] = 32
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
        losses_of(recipe, x, weight, None, labels, PLAIN)


def test_tiny_and_huge_logits():
    x, weight, _, labels = operands(64, 16, 128, torch.float32)
    for factor in (1e-30, 1e4):
        given = (x * factor, weight, None, labels)
        found, grads = gradients(partial(losses_of, "none", loss=PLAIN), given, torch.ones(64))
        wanted, wanted_grads = gradients(partial(reference, loss=PLAIN), given, torch.ones(64))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert error(grads[1], wanted_grads[1]) <= 1e-4


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_wanted_is_computed(needs):
    """A frozen output layer has a gradient of x, and an output layer behind a frozen model one of the weight."""
    x, weight, _, labels = operands(16, 32, 64, torch.bfloat16)
    for recipe in ("none", "current"):
        leaves = [one.detach().requires_grad_(need) for one, need in zip((x, weight), needs, strict=True)]
        found = losses_of(recipe, *leaves, None, labels, PLAIN)
        assert found.requires_grad == any(needs)
        if any(needs):
            found.sum().backward()
        assert [one.grad is not None for one in leaves] == list(needs)


@pytest.mark.parametrize("inner", [1.0, 1 / 0.9, 0.7])
def test_a_factor_of_logits_costs_no_precision(inner):
    """The gradients of labels are nearly the bound, which a cast leaves as it is, whatever the factor."""
    given, loss = operands(256, 64, 512, torch.bfloat16), Loss(IGNORED, inner=inner)
    _, found = gradients(partial(losses_of, "current", loss=loss), given, torch.ones(256))
    _, wanted = gradients(partial(reference, loss=loss), given, torch.ones(256))
    assert all(error(one, other) <= 0.05 for one, other in zip(found, wanted, strict=True))
