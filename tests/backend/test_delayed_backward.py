"""Delayed scaling and backwards: several microbatches in flight, one backward twice, checkpoints that compute again."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from te_inductor.errors import FallbackWarning
from tests.backend.delayed_programs import Blocks, equal_steps, steps, te, trained_steps

pytestmark = pytest.mark.usefixtures("without_codegen")


@pytest.mark.codegen
def test_microbatches_forward_forward_backward_backward():
    """Each backward computes with the scales that its own forward read, and records into the state as it now is. (Where
    copies of weights are kept, those of the weight are the newest: the next test but one.)"""
    layer = steps(weights="each_call")
    layer.backward(*layer.forward(torch.randn(8, 32)))
    for _ in range(2):
        first = layer.forward(torch.randn(8, 32))
        second = layer.forward(torch.randn(8, 32) * 8)
        layer.backward(*first)
        layer.backward(*second)


@pytest.mark.thorough
@pytest.mark.codegen
def test_microbatches_backward_in_reverse():
    layer = steps(weights="each_call")
    first = layer.forward(torch.randn(8, 32))
    second = layer.forward(torch.randn(8, 32) * 8)
    layer.backward(*second)
    layer.backward(*first)


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.parametrize("order", [1, -1])
def test_microbatches_that_share_copies(order):
    """Kept copies are of the weight, with the newest scale, whichever forward's backward reads them: data and scale_inv
    go together. The first forward casts with scale 1, to which 1e-3 is nothing."""
    layer = nn.Linear(32, 48)
    with torch.no_grad():
        layer.weight.mul_(1e-2)
    run = te(layer)
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
    ys = [run(x) for x in xs]
    for x, y in list(zip(xs, ys, strict=True))[::order]:
        dy = torch.randn_like(y)
        y.backward(dy)
        expected = dy @ layer.weight
        assert (x.grad - expected).norm() < 0.1 * expected.norm()


@pytest.mark.codegen
def test_retain_graph():
    """Twice through one backward: the same scales, two updates."""
    layer = steps()
    with functorch.patch(
        donated_buffer=False
    ):  # torch refuses retain_graph where a cache has a backward compiled without
        for _ in range(2):
            run = layer.forward(torch.randn(8, 32))
            layer.backward(*run, retain_graph=True)
            layer.backward(*run, retain_graph=True)


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "scaled_mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_casts(ctx, op, *args, **kwargs):
    recompute = "quantize" in str(op) or "gelu" in str(op)
    return CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.PREFER_SAVE


WRAPS = {
    "full": partial(checkpoint, use_reentrant=False),
    "products saved": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "casts recomputed": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, recompute_casts)
    ),
}


@cache
def of_plain_blocks() -> tuple[Blocks, list]:
    """Blocks as they were before they trained, and their steps."""
    plain = Blocks()
    before = copy.deepcopy(plain)
    return before, trained_steps(plain, te(plain))


@pytest.mark.quick("full", "casts recomputed")
@pytest.mark.parametrize("kind", WRAPS)
def test_activation_checkpointing_changes_nothing(kind):
    """Bit for bit, state included: what the backward computes again it casts with the scales of the forward, and it
    records nothing twice."""
    plain, expected = of_plain_blocks()
    wrapped = copy.deepcopy(plain)
    wrapped.wrap = WRAPS[kind]
    torch._dynamo.reset()
    assert equal_steps(trained_steps(wrapped, te(wrapped)), expected)


def test_compiled_autograd():
    """Step by step, state included, where torch captures each backward as a graph."""
    plain, expected = of_plain_blocks()
    other = copy.deepcopy(plain)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        assert equal_steps(trained_steps(other, te(other)), expected)
    assert counters["compiled_autograd"]["captures"]


@pytest.mark.quick("True")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_module(use_reentrant, recwarn):
    """The second forward is another step without reentry, which is said once; with it the first records nothing."""
    run = te(nn.Linear(32, 32), fallback="warn")
    for _ in range(2):
        x = torch.randn(8, 32, requires_grad=True)
        checkpoint(run, x, use_reentrant=use_reentrant).sum().backward()
        run(x).sum().backward()
    said = [warning for warning in recwarn if "a checkpoint around a compiled module" in str(warning.message)]
    assert [warning.category for warning in said] == [FallbackWarning] * (not use_reentrant)
