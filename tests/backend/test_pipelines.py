"""Weight gradients that a schedule of torch.distributed.pipelining asks for in its idle time, on two and four ranks."""

import pytest

from tests.backend.pipeline_ranks import STEPS
from tests.forked_ranks import ranks

thorough = pytest.mark.thorough
CASES = [
    (2, "ZBVZeroBubble", "current", "uncompiled"),
    pytest.param(2, "ZBVZeroBubble", "current", "compiled", marks=thorough),
    pytest.param(2, "Interleaved1F1B", "rowwise", "compiled", marks=thorough),
    pytest.param(4, "ZBVZeroBubble", "rowwise", "compiled", marks=thorough),
    pytest.param(4, "Interleaved1F1B", "current", "compiled", marks=thorough),
]


@pytest.mark.parametrize(("world", "schedule", "recipe", "how"), CASES)
def test_losses_are_those_of_one_rank(world, schedule, recipe, how, tmp_path):
    """Bit for bit, and so are the parameters: each adds up what its microbatches leave in the same order."""
    told = ranks("tests.backend.pipeline_ranks", world, str(tmp_path / "store"), schedule, recipe, how)
    last = [rank for rank in told if any(rank["losses"])]
    assert len(last) == 1 and last[0]["losses"] == last[0]["alone"]
    for rank in told:
        assert rank["apart"] == 0.0
        assert rank["ran"] == 2 * 2 * 2 * world * STEPS  # two stages of two layers; microbatches
