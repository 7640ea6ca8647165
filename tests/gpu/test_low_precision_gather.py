"""FSDP2 gathers weights in FP8 on two GPUs, by NCCL (`gpu2`)."""

import math

import pytest

from tests.forked_ranks import spawned_ranks


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_training_is_equal_and_moves_half_the_bytes(recipe, tmp_path):
    """Losses and parameters, bit for bit: casts have the same arithmetic wherever they run."""
    told = spawned_ranks("tests.gpu.gather_ranks", 2, str(tmp_path / "store"), "cuda", recipe)
    for one in told:
        assert one["compiled"]
        assert all(map(math.isfinite, one["losses"][0])) and one["losses"][0] == one["losses"][1]
        assert one["equal"]
        before, after = one["bytes"]
        assert 0.5 <= after / before < 0.505  # norms and biases stay in bf16
