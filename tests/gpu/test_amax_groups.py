"""Amaxes of two GPUs, reduced by NCCL, also inside of CUDA graphs (`gpu2`)."""

import pytest

from tests.forked_ranks import spawned_ranks


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_both_ranks_have_the_larger_amaxes(wrapper, mode, tmp_path):
    first, second = spawned_ranks("tests.gpu.amax_group_ranks", 2, str(tmp_path / "store"), "cuda", mode, wrapper)
    assert first == second
    assert first["input"][-8:] == [2.0 + 10.0 * step for step in range(8)]
    if mode == "reduce-overhead" and wrapper == "none":
        assert first["skips"] == {}
