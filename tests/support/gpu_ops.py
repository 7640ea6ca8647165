"""Sizes and tolerances of tests on a GPU."""

import pytest
import torch


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


SIZES = [(1, 1), (3, 17), (33, 70), (128, 64), (256, 384), (257, 1040), (64, 4096)]


FAST_BITS = (
    13  # Hopper's fast accumulation keeps at least this many bits of each partial sum (DeepSeek-V3, section 3.5.2)
)


@pytest.fixture(autouse=True)
def compile_every_size():
    """Lifts the recompile limit, past which Dynamo would run the function eagerly, and nothing compiled would be
    tested."""
    with torch._dynamo.config.patch(recompile_limit=1000, fail_on_recompile_limit_hit=True):
        yield
