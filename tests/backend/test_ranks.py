"""Delayed scaling on several ranks: real processes, gloo, CPU."""

import json
import math
from pathlib import Path

import pytest

from tests.forked_ranks import ranks, ranks_once

WORLD = 2


def run(folder: Path, fields: dict, kind: str = "plain") -> list[list[dict]]:
    """What each rank tells of its steps."""
    return ranks("tests.backend.ranks", WORLD, str(folder / "store"), json.dumps(fields), kind)


def history(steps: list[dict], slot: str) -> list[float]:
    return steps[-1]["state"][f"{slot}.amax_history"]


@pytest.mark.quick("plain", "uncompiled split ddp")
@pytest.mark.parametrize("kind", ["plain", "ddp", "split ddp", "uncompiled split ddp"])
def test_amaxes_are_the_largest_of_all_ranks(kind, tmp_path):
    """Every rank ends each step with the same state. A rank's NaN hides no other rank's observation."""
    first, second = run(tmp_path, {}, kind)
    for a, b in zip(first, second, strict=True):
        assert a["state"] == b["state"]
    assert history(first, "input") == [0.0, 2.0, 11.0, 22.0]  # of rank 1, in the second step of rank 0 alone
    assert history(first, "grad_output") == [0.0, 1.0, 2.0, 3.0]  # of rank 0


@pytest.mark.thorough
def test_without_reduction_ranks_keep_their_own(tmp_path):
    first, second = run(tmp_path, {"reduce_amax": False})
    assert history(first, "input") == [0.0, 1.0, 11.0, 21.0]
    assert history(second, "input") == [0.0, 0.0, 2.0, 22.0]  # its NaN was no observation
    assert history(second, "grad_output")[-1] == 1.5
    assert all(math.isfinite(value) for step in second for value in step["state"]["input.amax_history"])


DIFFERENT = "run graphs with different quantizers at the same time"
ABSENT = "did not come to a graph with the same quantizers"


@pytest.fixture(scope="module")
def unequal(tmp_path_factory) -> list[dict]:
    kinds = "unequal,equal,more graphs,other order,pipeline,no compile"
    return ranks_once(tmp_path_factory, "tests.backend.unequal_ranks", WORLD, kinds)


@pytest.mark.parametrize("kind, why_not", [("unequal", DIFFERENT), ("other order", DIFFERENT), ("pipeline", ABSENT)])
def test_ranks_that_differ_keep_their_own_amaxes(kind, why_not, unequal):
    """They neither mix nor wait for each other for ever, and each says so once."""
    for rank, told in enumerate(unequal):
        assert [why_not in text for text in told[kind]["said"]] == [True]
        if kind != "pipeline":
            assert told[kind]["model"]["0.input.amax_history"] == 1.0 + rank
    first, second = (told[kind] for told in unequal)
    assert set(first["model"].values()).isdisjoint(second["model"].values())


def test_ranks_that_are_equal_reduce_beside_groups_that_did_not(unequal):
    first, second = (told["equal"] for told in unequal)
    assert first["said"] == second["said"] == []
    assert first["model"] == second["model"] and first["model"]["0.input.amax_history"] == 2.0


def test_a_graph_that_one_rank_has_is_its_own(unequal):
    """Graphs that both have are reduced."""
    first, second = (told["more graphs"] for told in unequal)
    assert first["model"] == second["model"] and first["model"]["0.input.amax_history"] == 2.0
    assert first["other"]["0.input.amax_history"] == 1.0 and second["other"] == {}
    assert [ABSENT in text for text in first["said"]] == [True] and second["said"] == []


def test_nobody_waits_for_a_rank_whose_compile_failed(unequal):
    first, second = (told["no compile"] for told in unequal)
    assert ["rank 1 could not compile a graph in low precision" in text for text in first["said"]] == [True]
    assert first["model"]["0.input.amax_history"] == 1.0 and second["model"] == {}


@pytest.fixture(scope="module", params=["uncompiled", pytest.param("compiled", marks=pytest.mark.thorough)])
def sharded(request, tmp_path_factory) -> list[dict]:
    return ranks_once(tmp_path_factory, "tests.backend.sharded_ranks", WORLD, request.param)


@pytest.mark.parametrize("compiled", ["whole", "blocks"])
def test_state_under_fsdp2_is_saved_and_loaded(compiled, sharded):
    """By the names of the sharded parameters, before the first gather and after, bit for bit."""
    layers = ["0.up", "0.down", "1.up", "1.down", "2.proj"]
    slots = [f"{slot}.scale" for slot in ("input", "weight", "grad_output")]
    for told in (told[compiled] for told in sharded):
        assert told.pop("keys") == [f"{layer}.{slot}" for layer in layers for slot in slots]
        assert told.pop("of a part")[::2] == slots
        assert told.pop("loaded") == [[], []]
        assert [name for name, fine in told.items() if not fine] == []


def test_state_that_cannot_be_found_is_an_error(sharded):
    for told in sharded:
        assert "FSDP shards extra, and what it gathers of them" in told["lost"]
