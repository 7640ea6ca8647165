"""Attention on two ranks, each with lengths and paddings of its own, in a process each."""

import pytest

from tests.ranks import told_by

told = told_by("tests.backend.attention_ranks", 2, "program ddp")
others = told_by("tests.backend.attention_ranks", 2, "program fsdp,program tp")


def test_lengths_and_paddings_of_each_rank(told):
    check("ddp", told)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_lengths_and_paddings_of_each_rank_too(kind, others):
    check(kind, others)


def check(kind, told):
    for found in told[f"program {kind}"]:
        assert found["off"] < 1e-5  # fp32 sums in another order
        assert found["kernels"] == ["flex_attention"]
