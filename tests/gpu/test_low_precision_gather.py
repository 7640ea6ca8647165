"""FSDP2 gathers weights in FP8 on two GPUs, by NCCL (`gpu2`)."""

import math

import pytest

from tests.ranks import ranks_on_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_training_is_equal_and_moves_half_the_bytes(recipe):
    """Losses and parameters, bit for bit: casts have the same arithmetic wherever they run."""
    case = f"trains {recipe}"
    for one in ranks_on_gpus("tests.gpu.gather_ranks", 2, case)[case]:
        assert one["compiled"]
        assert all(map(math.isfinite, one["losses"][0])) and one["losses"][0] == one["losses"][1]
        assert one["equal"]
        before, after = one["bytes"]
        assert 0.5 <= after / before < 0.505  # norms and biases stay in bf16
