"""Process groups that come after others, as in a job that goes on with another rank in the place of one that died."""

from tests.ranks import told_by

told = told_by("tests.backend.regrouped_ranks", 2, "again")


def test_ranks_that_were_in_other_numbers_of_groups_agree(told):
    """Each has left something for the others under keys by which these look for it."""
    assert not [text for text in told.said("again")[1] if "amaxes" in text]
    (state, _), (other, _) = told["again"]
    assert state == other and max(state["layer.input.amax_history"]) == 2.0


def test_a_store_is_let_go_of_with_its_group(told):
    """Another group may have its address, and would find what gloo has left there."""
    assert all(gone for _, gone in told["again"])
