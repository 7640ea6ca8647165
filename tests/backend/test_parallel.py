"""Tensor and sequence parallelism: two real processes, gloo, CPU. Cases: parallel_ranks.py. Under delayed scaling all
ranks have the scales of one, so that results differ by the order of fp32 sums alone; a cast with another scale would show
as 2e-2. Other recipes are held to the error that one rank has against float64."""

import pytest

from tests.ranks import Told, ranks, told_by

SAME = 1e-4  # a value in a hundred thousand that falls to the other side of a rounding boundary
ALIKE = 2.0  # errors of roundings that are other ones
QUICK = "sequence delayed,with_fsdp delayed,refused,without_group"
# The loss comes first: behind other graphs torch 2.13 cannot partition that one, as the user wrote it neither.
OTHERS = (
    "loss current,loss delayed,sequence_bias current,nan,"
    "plain delayed,plain_bias delayed,sequence current,sequence_bias delayed,two delayed,"
    "checkpointed delayed,sequence rowwise,sequence_wide block,sequence_wide mxfp8,whole_weights current,"
    "plain current,whole_weights delayed,blocks delayed,symbolic delayed,"
    "compiled sequence delayed,compiled sequence_bias current"
)
APART = ("loss", "whole", "sequence_wide mxfp8", "nan")  # which have tests of their own


MODULE = "tests.backend.parallel_ranks"
told = told_by(MODULE, 2, QUICK)
others = told_by(MODULE, 2, OTHERS, timeout=600)


def check(kind: str, told: Told) -> None:
    assert not any(told.said(kind))
    for found in told[kind]:
        assert found["low"] > 0 or kind.startswith("compiled")  # whose graphs nobody sees
        if "delayed" in kind:
            assert found["one rank"] < SAME
        for error, alone in zip(found["error"], found["error of one rank"], strict=True):
            assert error < ALIKE * alone + 1e-6


def test_training_is_that_of_one_rank(told):
    check("sequence delayed", told)


def test_a_mesh_with_one_rank_of_tensor_parallelism(told):
    """Two ranks of FSDP2, whose layers are DTensors of one rank each: nobody is waited for."""
    check("with_fsdp delayed", told)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in OTHERS.split(",") if not kind.startswith(APART)])
def test_training_is_that_of_one_rank_too(kind, others):
    check(kind, others)


@pytest.mark.thorough
def test_transformers_plan():
    check("llama delayed", ranks(MODULE, 2, "llama delayed"))


@pytest.mark.thorough
def test_training_with_fsdp2_is_that_of_one_rank():
    kinds = ["with_fsdp delayed", "with_fsdp current"]
    found = ranks(MODULE, 4, ",".join(kinds), timeout=600)
    for kind in kinds:
        check(kind, found)


@pytest.mark.thorough
def test_weights_that_fsdp2_gathers_in_fp8_share_one_gather_of_their_input():
    """gate and up, each with the scale of its own weight, so that results are one rank's under `block` alone; x is
    gathered once, and the sum of dx scattered once, as dy and y of down are."""
    kinds = ["with_gathers delayed", "with_gathers current", "with_gathers block"]
    found = ranks(MODULE, 4, ",".join(kinds), timeout=600)
    for kind in kinds:
        assert not any(found.said(kind))
        for told in found[kind]:
            assert "block" not in kind or told["one rank"] < SAME
            for error, alone in zip(told["error"], told["error of one rank"], strict=True):
                assert error < ALIKE * alone + 1e-6
            for graph in told["wire"] if "block" not in kind else ():
                moved = [entry for entry in graph if entry[0] != "all_reduce"]
                assert moved == [["all_gather_into_tensor", "uint8", 4096], ["reduce_scatter_tensor", "float32", 8192]]


@pytest.mark.thorough
def test_what_is_emulated_is_no_further_off(others):
    for found in others["sequence_wide mxfp8"]:
        assert found["one rank"] < SAME


def test_shards_are_gathered_in_fp8(told):
    """x in the forward, dy in the backward: a byte an element; sums are scattered in the layer's dtype."""
    for found in told["sequence delayed"]:
        graphs = found["wire"]
        for graph in graphs:
            kinds = [(name, dtype, size) for name, dtype, size in graph if name != "all_reduce"]
            assert kinds == [("all_gather_into_tensor", "uint8", 4096), ("reduce_scatter_tensor", "float32", 8192)]
        # Scales are reduced in the first step's graphs; in later ones amaxes are, inside of an op.
        assert [sum(name == "all_reduce" for name, *_ in graph) == 0 for graph in graphs].count(True) == 1


@pytest.mark.thorough
def test_the_amax_of_shards_is_reduced_once(others):
    for found in others["sequence_bias current"]:
        reduced = [[entry for entry in graph if entry[0] == "all_reduce"] for graph in found["wire"]]
        assert reduced == [[["all_reduce", "int32", 4]]]


@pytest.mark.thorough
def test_a_loss_of_shards(others):
    for loss in others["loss current"]:
        assert loss["low"] == 3 and max(loss["off"]) < 0.01


@pytest.mark.thorough
def test_whole_weights_beside_dealt_rows(others):
    """Results are as far from high precision as the products of two tensors of E4M3, or of one and one of E5M2, are."""
    for found in others["whole_weights delayed"]:
        y, dx, dw, db = found["off"]
        assert y < 2**-4 and dx < 2**-3 and dw < 2**-3 and db == 0


@pytest.mark.thorough
def test_a_nan_of_one_rank_is_where_it_is_with_one(others):
    assert [found["rows"] for found in others["nan"]] == [1, 0]
    assert all(found["same"] for found in others["nan"])


REASONS = {
    "partial": "input is a DTensor of partial sums, which no cast may round",
    "uneven weight": "weight of shape (63, 64) is sharded unevenly over 2 ranks",
    "uneven input": "input of shape (31, 64) is sharded unevenly over 2 ranks",
    "grid": "weight is a DTensor over a mesh of 2 dimensions, not one",
    "inside": "weight is S(1) and input R: torch redistributes one inside of the layer",
    "bias": "a bias is added to partial sums of the ranks",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_is_refused_runs_in_high_precision(case, told):
    for found in told["refused"]:
        assert found[case] == {"reason": REASONS[case], "kernel": "high_precision", "off": 0.0}


def test_shards_want_scales_of_all_ranks(told):
    for reasons in told["without_group"]:
        assert all(
            "shards that are gathered in FP8 have one scale" in reasons[case][0] for case in ("recipe", "option")
        )
