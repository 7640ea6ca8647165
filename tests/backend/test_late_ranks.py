"""Ranks that have reduced amaxes together and of which one does something else later on: two real processes, gloo, CPU.
Cases: late_ranks.py."""

import pytest

from tests.ranks import told_by

KINDS = ("break", "region", "options")
ALONE = {"eager": (7, 6), "backward": (8, 7)}  # the calls of the rank that waits and of the other one
CASES = ["forward", *(f"step {kind}" for kind in KINDS), *(f"alone {kind}" for kind in ALONE)]
told = told_by("tests.backend.late_ranks", 2, ",".join(CASES))


def test_a_forward_that_one_rank_has_alone_is_told_before_it_takes_another_ones_amaxes(told):
    """Its own forward behind it never followed a forward before."""
    first, second = told["forward"]
    assert "call 41 of those that reduce over the same ranks is of layer 0 (graph" in first
    assert "on rank 1 of layer 0" in first and first.count("in its backward)") == 1
    assert second[0] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_alone_runs_layers_in_another_graph_is_told(kind, told):
    first, second = told[f"step {kind}"]
    assert (
        "rank 0 runs layers whose amaxes of delayed scaling it has reduced with other ranks in another graph" in first
    )
    assert "(rank 1 did not come to a graph with the same quantizers" in first
    assert second[0] == 2.0


@pytest.mark.parametrize("kind", ALONE)
def test_a_rank_that_waits_says_which_rank_makes_no_call(kind, told):
    """It does so once, before the process group's timeout, and names what both have done."""
    first, second = told.said(f"alone {kind}")
    own, others = ALONE[kind]
    [text] = [text for text in second if "has stood" in text]
    assert f"behind {own} calls that reduce amaxes" in text and f"rank 0 behind {others}, of which layer 0" in text
    assert "set_stance" in text and not [text for text in first if "has stood" in text]
