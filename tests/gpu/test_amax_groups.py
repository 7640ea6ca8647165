"""Amaxes of two GPUs, reduced by NCCL, also inside of CUDA graphs (`gpu2`)."""

import pytest

from tests.ranks import ranks_on_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_both_ranks_have_the_larger_amaxes(wrapper, mode):
    case = f"trains {mode} {wrapper}"
    first, second = ranks_on_gpus("tests.gpu.amax_group_ranks", 2, case)[case]
    assert first == second
    assert first["input"][-8:] == [2.0 + 10.0 * step for step in range(8)]
    if mode == "reduce-overhead" and wrapper == "none":
        assert first["skips"] == {}
