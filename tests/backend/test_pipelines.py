"""Weight gradients that a schedule of torch.distributed.pipelining asks for in its idle time, on two and four ranks."""

import pytest

from tests.ranks import ranks

thorough = pytest.mark.thorough
CASES = [
    (2, "trains ZBVZeroBubble current"),
    pytest.param(2, "compiled trains ZBVZeroBubble current", marks=thorough),
    pytest.param(2, "compiled trains Interleaved1F1B rowwise", marks=thorough),
    pytest.param(4, "compiled trains ZBVZeroBubble rowwise", marks=thorough),
    pytest.param(4, "compiled trains Interleaved1F1B current", marks=thorough),
]
STEPS = 3


@pytest.mark.parametrize(("world", "case"), CASES)
def test_losses_are_those_of_one_rank(world, case):
    """Bit for bit, and so are the parameters: each adds up what its microbatches leave in the same order."""
    told = ranks("tests.backend.pipeline_ranks", world, case)[case]
    last = [rank for rank in told if any(rank["losses"])]
    assert len(last) == 1 and last[0]["losses"] == last[0]["alone"]
    for rank in told:
        assert rank["apart"] == 0.0
        assert rank["ran"] == 2 * 2 * 2 * world * STEPS  # two stages of two layers; microbatches


def test_delayed_scaling_observes_microbatches_alone():
    """A stage that torch runs to find its shapes, on memory that nothing was written to and with a backward of ones, leaves
    nothing in a history. A schedule has other forwards before the first backward, so that they are cast otherwise."""
    for found, alone in ranks("tests.backend.pipeline_ranks", 2, "observes")["observes"]:
        for amaxes, expected in zip(found, alone, strict=True):
            assert len(amaxes) == 4 and max(amaxes) == pytest.approx(max(expected), rel=0.1)
