"""Scaling state of delayed scaling on another number of ranks than it was saved on: real processes, gloo, CPU. The
case: resized_ranks.py."""

import pytest

from tests.ranks import ranks


def trained(world: int, case: str) -> list[dict]:
    return ranks("tests.backend.resized_ranks", world, case)[case]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["graph", "fsdp2"])
def test_state_of_two_ranks_goes_on_with_four_and_with_one(kind, tmp_path):
    folder, states, losses = str(tmp_path / "saved"), [], []
    for world in (2, 4, 1):
        told = trained(world, f"trains {folder} {kind} 2")
        assert all(one["state"] == told[0]["state"] and one["loaded"] == told[0]["loaded"] for one in told)
        if states:
            assert told[0]["loaded"] == states[-1]
        states.append(told[0]["state"])
        losses += told[0]["losses"]
    [alone] = trained(1, f"trains {tmp_path / 'alone'} {kind} 6")
    # Each rank's first step has scales of its own; from then on they are those of one rank.
    assert losses == pytest.approx(alone["losses"], rel=0.01)
    for name, known in alone["state"].items():
        if name.endswith("amax_history") and "grad_output" not in name:
            assert states[-1][name] == pytest.approx(known, rel=0.05), name
