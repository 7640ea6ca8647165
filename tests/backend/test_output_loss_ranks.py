"""Output layers with their losses on two ranks, each with lengths of its own, in a process each."""

import pytest

from tests.ranks import told_by

MODULE = "tests.backend.output_loss_ranks"
QUICK = ("ddp delayed", "sp current")
CASES = ("tied current", "fsdp delayed", "tp current")
told = told_by(MODULE, 2, ",".join([*(f"program {case}" for case in QUICK), "reasons tp", "gathers current"]))
others = told_by(MODULE, 2, ",".join([*(f"program {case}" for case in CASES), "reasons sp", "outside current"]))


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


@pytest.mark.parametrize("kind", ["tp", pytest.param("sp", marks=pytest.mark.thorough)])
def test_a_vocabulary_that_ranks_share_is_left_with_a_reason(kind, request):
    for reasons in request.getfixturevalue("told" if kind == "tp" else "others")[f"reasons {kind}"]:
        assert len(reasons) == 1 and "the output layer is tensor parallel" in reasons[0]


@pytest.mark.thorough
def test_a_loss_of_sharded_words_behind_the_graph(others):
    assert max(others["outside current"]) < 0.09


def test_a_weight_is_gathered_once_for_all_chunks(told):
    for (gathered, chunks), (as_in_eager, _) in told["gathers current"]:
        assert gathered == as_in_eager and chunks > 1
