"""Tensor-parallel ranks that have to do alike, and those that do not: two real processes, gloo, CPU. Cases:
parallel_alike_ranks.py."""

import pytest
import torch

from tests.ranks import Told, ranks, told_by

MODULE = "tests.backend.parallel_alike_ranks"
told = told_by(MODULE, 2, "first_step may,first_step must not,agree,decides,fails,compiled cached_first_step")
late = told_by(MODULE, 2, "changes ,changes alone,breaks ,breaks alone,loads_other")
others = told_by(MODULE, 2, "masked,many_first_steps", timeout=600)


def test_ranks_that_decide_otherwise_are_found_before_they_run(told):
    first, second = told["decides"]
    assert first == ["ValueError: ran"] * 3
    same, other, high = second
    assert same == "ValueError: ran"
    expected = (
        "GatherError: rank 1 would run a layer otherwise than rank 0, with which it exchanges tensors:"
        " 'layers.0.gate in {}', where rank 0 has 'layers.0.gate in {}'; compile the same graph with the same options"
        " on all of them"
    )
    assert expected.format("delayed", "current") in other
    assert expected.format("current", "high precision") in high


def test_ranks_change_together_or_one_is_told(late):
    """The other one may be in a collective of what it has run before."""
    assert late["changes "] == ["", ""]
    first, second = late["changes alone"]
    assert (
        "rank 0 would run a layer otherwise than ranks with which it exchanges tensors: 'layers.0.gate in high" in first
    )
    assert "where it had 'layers.0.gate in current" in first and second == ""


def test_ranks_break_a_graph_together_or_one_is_told(late):
    """The broken graph reduces amaxes of fewer layers at once, for which the other rank would not come."""
    assert late["breaks "] == ["", ""]
    first, second = late["breaks alone"]
    assert "in delayed, in one graph with gate', where it had" in first and second == ""


def test_ranks_that_have_loaded_other_scales_are_told(late):
    for rank, said in enumerate(late["loads_other"]):
        assert said.startswith(
            f"rank {rank} has loaded another state of delayed scaling than others of ranks 0, 1, whose"
        )


def check_masked(told: Told) -> None:
    """Every step of every rank is as far from high precision as FP8 is, and none has hung."""
    for found in told["masked"]:
        assert len(found["off"]) == 6 and max(found["off"]) < 0.3
    *graphs, of_last = [found["wire"] for found in told["masked"]]
    # In the forwards of a first step and of later ones, and in their backwards; where a rank has compiled alone, once more.
    assert graphs == [[6, 4, 2, 2]] * len(graphs)
    assert of_last == [6, 4, 2, *[6, 4, 2, 2] * 2]


@pytest.mark.thorough
def test_ranks_run_the_graph_of_a_first_step_together(others):
    check_masked(others)


@pytest.mark.thorough
def test_four_ranks_run_the_graph_of_a_first_step_together():
    check_masked(ranks(MODULE, 4, "masked"))


def test_ranks_interpret_a_first_step_where_all_of_them_may(told):
    """Note [Ranks that interpret]."""
    together, alone = told["first_step may"], told["first_step must not"]
    assert [one["graphs"] for one in together] == [{"interpreted": 2, "compiled": 2}] * 2
    assert [one["graphs"] for one in alone] == [{"interpreted": 0, "compiled": 4}] * 2
    assert [one["found"] for one in together] == [one["found"] for one in alone]


def test_ranks_find_the_graph_of_a_first_step_in_a_cache_where_all_may_interpret_it(told):
    """One that has no cache compiles meanwhile. Both ask each other once, as another rank may not."""
    first, last = told["compiled cached_first_step"]
    if torch.__version__ < (2, 12):
        assert all(one["hits"] == 0 for one in (*first, *last))
        pytest.skip("torch 2.11 keeps no graph that makes DTensors")
    assert [(one["hits"], one["anew"]) for one in first] == [(0, 2), (1, 0), (1, 0), (0, 0)]
    assert [(one["hits"], one["anew"]) for one in last] == [(0, 2), (1, 0), (0, 2), (0, 0)]
    for fills, finds, without, _ in (first, last):
        assert fills["gave"] == finds["gave"] == without["gave"]


def test_no_rank_waits_to_interpret_for_one_that_could_not_compile(told):
    assert told["agree"] == [[False, True, False]] * 2


@pytest.mark.thorough
def test_ranks_find_many_first_steps_in_the_same_call(others):
    """Both compile code for them, although one has compiled alone before."""
    first, last = others["many_first_steps"]
    assert (first, last) == ([False, True], [False, False, True])


@pytest.mark.thorough
def test_a_rank_that_loads_state_alone_says_so():
    """The others end with the group's timeout, which is ten seconds."""
    assert [error for error, _ in ranks(MODULE, 2, "loads")["loads"]] == ["RuntimeError", "StateError"]


def test_a_compile_that_fails_on_one_rank_alone_is_found(told):
    first, second = told["fails"]
    assert first == ["", "ValueError: ran"]
    assert second[0] == ""
    assert "'layers.0.gate as the user wrote it, since its compile failed', where rank 0 has" in second[1]


@pytest.mark.thorough
def test_a_rank_that_is_left_alone_ends_with_the_groups_timeout():
    """The timeout is ten seconds: another rank's backward raises."""
    for error, seconds in ranks(MODULE, 2, "raises delayed")["raises delayed"]:
        assert error and seconds < 60


@pytest.mark.thorough
def test_ranks_with_other_lengths_end():
    """gloo sees that collectives do not fit, and ends a rank."""
    with pytest.raises(AssertionError, match=r"collective mismatch|Connection|Timed out"):
        ranks(MODULE, 2, "other_length delayed", timeout=100)
