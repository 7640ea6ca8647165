"""Attention on two ranks, each with lengths and paddings of its own, in a process each."""

import pytest
import torch

from tests.ranks import told_by

old_torch = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot flatten heads that ranks share")
told = told_by(
    "tests.backend.attention_ranks", 2, "program ddp,of_dtensors context,of_dtensors heads,of_dtensors hand,stays_local"
)
others = told_by("tests.backend.attention_ranks", 2, "program fsdp,program tp")


@old_torch
def test_lengths_and_paddings_of_each_rank(told):
    check("ddp", told)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_lengths_and_paddings_of_each_rank_too(kind, others):
    check(kind, others)


@old_torch
@pytest.mark.parametrize("kind", ["context", "heads", "hand"])
def test_layers_beside_attention_of_dtensors_run_in_low_precision(kind, told):
    """Attention stays as it is written. Off by the casts of q, k, v and o, each rounding to a relative 2**-4 at most, which
    is seen to have happened."""
    for off, gradient in told[f"of_dtensors {kind}"]:
        assert 1e-4 < off < 2 * 4 * 2**-4 and gradient > 0


@old_torch
def test_attention_by_hand_stays_that_of_its_rank(told):
    """Context parallelism has another function in the place of torch's, which is not what the program calls."""
    assert max(told["stays_local"]) < 1e-5


def check(kind, told):
    for found in told[f"program {kind}"]:
        assert found["off"] < 1e-5  # fp32 sums in another order
        assert found["kernels"] == ["flex_attention"]
