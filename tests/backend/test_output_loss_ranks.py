"""Output layers with their losses on two ranks, each with lengths of its own, in a process each."""

import pytest

from tests.ranks import told_by

CASES = ("ddp delayed", "tied current", "fsdp delayed", "tp current")
told = told_by("tests.backend.output_loss_ranks", 2, ",".join(f"program {case}" for case in CASES))


@pytest.mark.parametrize("case", CASES)
def test_losses_of_ranks(case, told):
    """Gradients are those of high precision within what FP8 rounds. A vocabulary that ranks share is left as it is
    written."""
    for found in told[f"program {case}"]:
        assert found["off"] < 0.09
        assert ("OmittedLogits" in found["logits"]) == ("tp" not in case)
