"""Sequence parallelism on two GPUs, over NCCL (`gpu2`)."""

import pytest

from tests.forked_ranks import spawned_ranks


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_training_is_as_exact_as_on_one_gpu(recipe, tmp_path):
    """Errors against bf16, of which sums of shards are rounded once more."""
    for told in spawned_ranks("tests.gpu.parallel_ranks", 2, str(tmp_path / "store"), recipe, timeout=500):
        assert told["said"] == []
        for error, alone in zip(told["error"], told["error of one"], strict=True):
            assert error < 2 * alone + 2**-8
