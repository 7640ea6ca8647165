"""Attention on two ranks, each with lengths and paddings of its own, in a process each."""

import pytest

from tests.ranks import told_by

KINDS = ("ddp", "fsdp", "tp")
told = told_by("tests.backend.attention_ranks", 2, ",".join(f"program {kind}" for kind in KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_and_paddings_of_each_rank(kind, told):
    for found in told[f"program {kind}"]:
        assert found["off"] < 1e-5  # fp32 sums in another order
        assert found["kernels"] == ["flex_attention"]
