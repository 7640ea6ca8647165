"""Sequence parallelism on two GPUs, over NCCL (`gpu2`)."""

import pytest

from tests.ranks import ranks_on_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_training_is_as_exact_as_on_one_gpu(recipe):
    """Errors against bf16, of which sums of shards are rounded once more."""
    case = f"trains {recipe}"
    told = ranks_on_gpus("tests.gpu.parallel_ranks", 2, case, timeout=500)
    assert not any(told.said(case))
    for found in told[case]:
        for error, alone in zip(found["error"], found["error of one"], strict=True):
            assert error < 2 * alone + 2**-8
