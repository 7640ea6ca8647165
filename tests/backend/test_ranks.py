"""Delayed scaling on several ranks: real processes, gloo, CPU. Cases: delayed_ranks.py."""

import math
import re

import pytest

from tests.ranks import ranks, told_by

MODULE, WORLD = "tests.backend.delayed_ranks", 2
DIFFER = ("unequal", "pipeline", "no_compile")
QUICK = ["trains plain", *(f"differ {kind}" for kind in DIFFER), "sharded blocks", "lost", "apart unused", "apart join"]
QUICK += ["other_rows empty", "other_rows less", "other_rows more", "microbatches ddp", "microbatches fsdp"]
QUICK += ["checkpointed", "reentrant", "other_calls order", "other_calls loaded"]
QUICK += ["unwrapped forwards", "unwrapped backwards"]
OTHERS = "trains split,differ equal,differ more_graphs,differ other_order,sharded whole"
told = told_by(MODULE, WORLD, ",".join(QUICK))
others = told_by(MODULE, WORLD, OTHERS)
compiled = told_by(
    MODULE,
    WORLD,
    "compiled interprets plain all,compiled interprets plain last,compiled interprets ddp all,"
    "compiled interprets split all,compiled sharded whole,compiled sharded blocks,compiled other_rows empty,"
    "compiled microbatches ddp",
    timeout=600,
)


def history(steps: list[dict], slot: str) -> list[float]:
    return steps[-1][f"{slot}.amax_history"]


def check_amaxes(first: list[dict], second: list[dict]) -> None:
    """Every rank ends each step with the same state. A rank's NaN hides no other rank's observation."""
    assert first == second
    assert history(first, "input") == [0.0, 2.0, 11.0, 22.0]  # of rank 1, in the second step of rank 0 alone
    assert history(first, "grad_output") == [0.0, 1.0, 2.0, 3.0]  # of rank 0


def test_amaxes_are_the_largest_of_all_ranks(told):
    check_amaxes(*told["trains plain"])


@pytest.mark.thorough
def test_amaxes_of_a_graph_that_is_split(others):
    check_amaxes(*others["trains split"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "interpreted"), [("plain all", [2, 2]), ("plain last", [2, 0]), ("ddp all", [2, 2]), ("split all", [4, 4])]
)
def test_first_steps_are_interpreted_and_amaxes_the_largest_of_all_ranks(kind, interpreted, compiled):
    """Ranks find the same amaxes also where one of them runs generated code in its first step: Note [Ranks that
    interpret]."""
    found = compiled[f"compiled interprets {kind}"]
    check_amaxes(*(one["steps"] for one in found))
    assert [one["interpreted"] for one in found] == interpreted


@pytest.mark.thorough
def test_without_reduction_ranks_keep_their_own():
    first, second = ranks(MODULE, WORLD, "compiled trains own")["compiled trains own"]
    assert history(first, "input") == [0.0, 1.0, 11.0, 21.0]
    assert history(second, "input") == [0.0, 0.0, 2.0, 22.0]  # its NaN was no observation
    assert history(second, "grad_output")[-1] == 1.5
    assert all(math.isfinite(value) for step in second for value in step["input.amax_history"])


DIFFERENT = "run graphs with different quantizers at the same time"
ABSENT = "did not come to a graph with the same quantizers"


@pytest.mark.parametrize("kind, why_not", [("unequal", DIFFERENT), ("pipeline", ABSENT)])
def test_ranks_that_differ_keep_their_own_amaxes(kind, why_not, told):
    check_that_they_differ(kind, why_not, *told[f"differ {kind}"])


@pytest.mark.thorough
def test_ranks_with_graphs_in_another_order_keep_their_own_amaxes(others):
    check_that_they_differ("other_order", DIFFERENT, *others["differ other_order"])


def check_that_they_differ(kind, why_not, first, second):
    """They neither mix nor wait for each other for ever, and each says so once."""
    for rank, one in enumerate((first, second)):
        assert [why_not in text for text in one["said"]] == [True]
        if kind != "pipeline":
            assert one["model"]["0.input.amax_history"] == 1.0 + rank
    assert set(first["model"].values()).isdisjoint(second["model"].values())


@pytest.mark.thorough
def test_ranks_that_are_equal_reduce_beside_groups_that_did_not(others):
    first, second = others["differ equal"]
    assert first["said"] == second["said"] == []
    assert first["model"] == second["model"] and first["model"]["0.input.amax_history"] == 2.0


@pytest.mark.thorough
def test_a_graph_that_one_rank_has_is_its_own(others):
    """Graphs that both have are reduced."""
    first, second = others["differ more_graphs"]
    assert first["model"] == second["model"] and first["model"]["0.input.amax_history"] == 2.0
    assert first["other"]["0.input.amax_history"] == 1.0 and second["other"] == {}
    assert [ABSENT in text for text in first["said"]] == [True] and second["said"] == []


@pytest.mark.parametrize(("kind", "newest"), [("unused", [[21.0, 11.0], [2.0, 22.0]]), ("join", [[21.0], [32.0]])])
def test_ranks_whose_ddp_lets_them_run_apart_keep_their_own_amaxes(kind, newest, told):
    """Amaxes that were reduced would be those of another layer, or a gradient's bucket."""
    assert [list(one.values()) for one in told[f"apart {kind}"]] == newest
    assert [["find_unused_parameters" in text for text in said] for said in told.said(f"apart {kind}")] == [[True]] * 2


@pytest.mark.parametrize(("kind", "newest"), [("empty", 21.0), ("less", 22.0)])
def test_layers_whose_amaxes_ranks_reduce_stay_so_for_any_number_of_rows(kind, newest, told):
    """The other rank would wait for it otherwise, or take a gradient's bucket for its amaxes."""
    first, second = told[f"other_rows {kind}"]
    assert first == second and first["layer.input.amax_history"] == newest


@pytest.mark.thorough
def test_generated_code_of_an_empty_batch_ends_the_step_of_the_other_rank(compiled):
    first, second = compiled["compiled other_rows empty"]
    assert first == second and first["layer.input.amax_history"] == 21.0


MICROBATCHES = ([[0.0, 0.0, 22.0, 122.0], [0.0, 0.0, 1.0, 2.0]], 2)  # of rank 1's third, and of rank 0's first


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_with_other_numbers_of_microbatches_reduce_the_amaxes_of_a_step(kind, told):
    """The amaxes of microbatches that reduce no gradients are reduced with those of the one that does."""
    assert told[f"microbatches {kind}"] == [list(MICROBATCHES)] * 2


@pytest.mark.thorough
def test_generated_code_of_microbatches_reduces_the_amaxes_of_a_step(compiled):
    assert compiled["compiled microbatches ddp"] == [list(MICROBATCHES)] * 2


def test_a_checkpoint_in_ddp_computes_again_what_its_forward_did(told):
    """A gradient is rounded to E5M2 twice, a weight and an input to E4M3, by an eighth and by a sixteenth at most."""
    assert all(off < 2 * (2**-3 + 2**-4) for off in told["checkpointed"])


@pytest.mark.parametrize(
    ("kind", "calls"),
    [("order", {("first", "0"), ("second", "0")}), ("loaded", {("first", "0"), ("first", "3")})],
)
def test_a_rank_that_calls_other_layers_or_has_loaded_state_alone_is_told(told, kind, calls):
    said = "".join(told[f"other_calls {kind}"])  # one rank is told: whichever comes second
    found = re.findall(r"of (\w+)\.layer\.weight \(graph \w+, (\d) loads", said)
    assert len(found) == 2 and set(found) == calls


@pytest.mark.parametrize("which", ["forwards", "backwards"])
def test_a_rank_that_calls_blocks_in_another_order_is_told_without_a_wrapper(told, which):
    """It is told in the first step, although the blocks have no names, by their weights."""
    said = "".join(told[f"unwrapped {which}"])
    assert set(re.findall(r"of (layer \d) \(graph", said)) == {"layer 0", "layer 1"}
    assert ("in its backward" in said) == (which == "backwards")


def test_a_checkpoint_with_reentry_reduces_amaxes_in_ddp(told):
    """Its backward records them, outside of DistributedDataParallel's forward. Its forward, without gradients, is none that
    lacks state."""
    first, second = told["reentrant"]
    assert first == second and first[0] == [0.0, 2.0, 3.0, 4.0]
    assert told.said("reentrant") == [[], []]


@pytest.mark.thorough
def test_a_rank_that_waits_for_the_others_amaxes_in_vain_says_for_which():
    waits, _ = ranks(MODULE, WORLD, "left_alone", timeout=100)["left_alone"]
    assert waits.startswith(
        "rank 0 could not reduce amaxes of delayed scaling over process group '0', expected rank 1 to"
    )


def test_layers_that_ranks_left_in_high_precision_stay_so_for_any_number_of_rows(told):
    first, second = told["other_rows more"]
    assert first == second and list(first) == ["other.input.amax_history"]


def test_nobody_waits_for_a_rank_whose_compile_failed(told):
    first, second = told["differ no_compile"]
    assert ["rank 1 could not compile a graph in low precision" in text for text in first["said"]] == [True]
    assert first["model"]["0.input.amax_history"] == 1.0 and second["model"] == {}


def test_state_under_fsdp2_is_saved_and_loaded(told):
    """State has the names of the sharded parameters, before the first gather and after, bit for bit."""
    check_state(told["sharded blocks"])


@pytest.mark.thorough
def test_state_of_a_whole_model_under_fsdp2_is_saved_and_loaded(others):
    check_state(others["sharded whole"])


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["whole", "blocks"])
def test_state_under_fsdp2_is_saved_and_loaded_in_generated_code(what, compiled):
    check_state(compiled[f"compiled sharded {what}"])


def check_state(of_ranks: list[dict]) -> None:
    layers = ["0.up", "0.down", "1.up", "1.down", "2.proj"]
    slots = [f"{slot}.scale" for slot in ("input", "weight", "grad_output")]
    for one in of_ranks:
        found = dict(one)
        assert found.pop("keys") == [f"{layer}.{slot}" for layer in layers for slot in slots]
        assert found.pop("of a part")[::2] == slots
        assert found.pop("loaded") == [[], []]
        assert [name for name, fine in found.items() if not fine] == []


def test_state_that_cannot_be_found_is_an_error(told):
    for said in told["lost"]:
        assert "FSDP shards extra, and what it gathers of them" in said
