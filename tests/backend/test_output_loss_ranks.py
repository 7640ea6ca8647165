"""Output layers with their losses on two ranks, each with lengths of its own, in a process each."""

import pytest

from tests.ranks import told_by

CASES = ("ddp delayed", "tied current", "fsdp delayed", "tp current", "sp current")
OTHERS = ("reasons tp", "reasons sp", "outside current", "gathers current")
told = told_by("tests.backend.output_loss_ranks", 2, ",".join([*(f"program {case}" for case in CASES), *OTHERS]))


@pytest.mark.parametrize("case", CASES)
def test_losses_of_ranks(case, told):
    """Gradients are those of high precision within what FP8 rounds. A vocabulary that ranks share is left as it is
    written."""
    for found in told[f"program {case}"]:
        assert found["off"] < 0.09
        assert ("OmittedLogits" in found["logits"]) == (case.partition(" ")[0] not in ("tp", "sp"))


@pytest.mark.parametrize("kind", ["tp", "sp"])
def test_a_vocabulary_that_ranks_share_is_left_with_a_reason(kind, told):
    for reasons in told[f"reasons {kind}"]:
        assert len(reasons) == 1 and "the output layer is tensor parallel" in reasons[0]


def test_a_loss_of_sharded_words_behind_the_graph(told):
    assert max(told["outside current"]) < 0.09


def test_a_weight_is_gathered_once_for_all_chunks(told):
    for (gathered, chunks), (as_in_eager, _) in told["gathers current"]:
        assert gathered == as_in_eager and chunks > 1
