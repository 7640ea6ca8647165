"""Output layers with their losses on two ranks, each with lengths of its own, in a process each."""

import pytest

from tests.ranks import told_by

MODULE = "tests.backend.output_loss_ranks"
QUICK = ("ddp delayed", "sp current")
CASES = ("tied current", "fsdp delayed", "tp current")
SHARED = ("shared current", "traced none", "unknown current", "left log-sums")
SHARED_TOO = ("shared none all", "shared delayed all", "shared rowwise all", "traced delayed", "unknown none")
told = told_by(MODULE, 2, ",".join([*(f"program {case}" for case in QUICK), "reasons tp", "gathers current", *SHARED]))
others = told_by(
    MODULE, 2, ",".join([*(f"program {case}" for case in CASES), "reasons sp", "outside current", *SHARED_TOO])
)


@pytest.mark.parametrize("case", QUICK)
def test_losses_of_ranks(case, told):
    check(case, told)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_losses_of_ranks_too(case, others):
    check(case, others)


def check(case, told):
    """Gradients are those of high precision within what FP8 rounds. A vocabulary that ranks share is left as it is
    written."""
    for found in told[f"program {case}"]:
        assert found["off"] < 0.09
        assert ("OmittedLogits" in found["logits"]) == (case.partition(" ")[0] not in ("tp", "sp"))


THOROUGH = pytest.mark.thorough
BOTH = [*SHARED, *(pytest.param(case, marks=THOROUGH) for case in SHARED_TOO)]


def of(case, request):
    return request.getfixturevalue("told" if case in SHARED else "others")[case]


@pytest.mark.parametrize("case", [one for one in BOTH if "shared" in str(one) or "traced" in str(one)])
def test_losses_of_words_that_ranks_share(case, request):
    """Ranks find one loss, those without a cast but for rounding; statistics go between them once a chunk, as often on
    each rank though one may have fewer words."""
    low = "none" not in case
    ranks = of(case, request)
    for programs in zip(*ranks, strict=True):
        first = programs[0]
        assert {one["off"][0] for one in programs} == {first["off"][0]}
        for found in programs:
            assert found["off"][0] < (0.005 if low else 1e-6) and max(found["off"]) < (0.075 if low else 1e-6)
            assert found["chunks"] == found["gathers"] == first["chunks"] > 0
            assert found["logits"] == "OmittedLogits"
    assert "traced" in case or ranks[0][0]["chunks"] > 1


@pytest.mark.parametrize("case", [one for one in BOTH if "unknown" in str(one)])
def test_a_label_that_no_rank_has_is_nan_on_all(case, request):
    """An error on one rank would leave the others waiting."""
    for is_nan, finite in of(case, request):
        assert is_nan and finite == [place != 6 for place in range(8)]


def test_a_loss_of_shared_words_is_left_with_a_reason(told):
    for reasons in told["left log-sums"]:
        assert len(reasons) == 1 and "the logarithms of its sums are read too" in str(reasons[0])


@pytest.mark.parametrize("kind", ["tp", pytest.param("sp", marks=pytest.mark.thorough)])
def test_a_vocabulary_that_ranks_share_is_left_with_a_reason(kind, request):
    for reasons in request.getfixturevalue("told" if kind == "tp" else "others")[f"reasons {kind}"]:
        assert len(reasons) == 1 and "the output layer is tensor parallel, and its logits are gathered" in reasons[0]


@pytest.mark.thorough
def test_a_loss_of_sharded_words_behind_the_graph(others):
    assert max(others["outside current"]) < 0.09


def test_a_weight_is_gathered_once_for_all_chunks(told):
    for (gathered, chunks), (as_in_eager, _) in told["gathers current"]:
        assert gathered == as_in_eager and chunks > 1
