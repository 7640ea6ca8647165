"""Expert parallelism: real processes, gloo, CPU. Cases: expert_parallel_ranks.py. Under delayed scaling two ranks
have the scales of one, and each expert its rows in the same order: results are equal, but for the order in which the
router's gradient is added up over the ranks, in fp32."""

import pytest

from tests.ranks import ranks, told_by

SAME, ALIKE = 1e-6, 2.0  # of errors: roundings that are other ones
QUICK = "trains delayed,unequal,reasons"
FORMS = (
    "trains current,waits current,split current,spread current,skewed delayed,skewed current,compiled trains current"
)
OTHERS = f"{FORMS},trains rowwise,read current"


MODULE = "tests.backend.expert_parallel_ranks"
told = told_by(MODULE, 2, QUICK)
others = told_by(MODULE, 2, OTHERS, timeout=900)


def check(kind: str, found: dict, sent: list[str]) -> None:
    if "current" not in kind:
        assert max(found["one rank"]) < SAME
    for error, alone in zip(found["error"], found["error of one rank"], strict=True):
        assert error < ALIKE * alone + 1e-6
    if "compiled" not in kind:  # whose graphs nobody sees
        assert found["sent"] and all(graph == sent for graph in found["sent"])


def test_training_is_that_of_one_rank_and_bytes_are_exchanged(told):
    """x in the forward and dy in the backward in FP8; y and dx in their own dtype."""
    for found in told["trains delayed"]:
        check("trains delayed", found, ["uint8", "bfloat16"])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FORMS.split(","))
def test_other_forms(kind, others):
    for found in others[kind]:
        check(kind, found, ["uint8", "bfloat16"])


@pytest.mark.thorough
def test_what_is_exchanged_in_high_precision(others):
    for found in others["trains rowwise"]:
        check("rowwise", found, ["bfloat16", "bfloat16"])
    for found in others["read current"]:
        check("current", found["Scaled"], ["bfloat16", "bfloat16"])
        assert [graph[0] for graph in found["Read"]["sent"]] == ["bfloat16", "uint8"]  # x as it was, dy in FP8


@pytest.mark.thorough
def test_training_is_that_of_one_rank_on_four():
    for found in ranks(MODULE, 4, "trains delayed", timeout=600)["trains delayed"]:
        check("trains delayed", found, ["uint8", "bfloat16"])


def test_ranks_of_unequal_sizes_decide_alike(told):
    """All do as the first one to compile has it."""
    sent = told["unequal"]
    assert sent[0] == sent[1] and sent[0][:2] in ([["uint8", "bfloat16"]] * 2, [["bfloat16", "bfloat16"]] * 2)


def test_reasons(told):
    x, dy = "rows between ranks go in {} to the experts", "gradients between ranks go in {} to the experts"
    expected = {
        "exchanged": ("e4m3", "e5m2", None, None),
        "rowwise": ("bfloat16",) * 2
        + ("recipe 'rowwise' reads them with scales of rows for one product and of columns for another",) * 2,
        "read": ("bfloat16", "e5m2", "something else reads the rows as they come", None),
        "waits": ("e4m3", "e5m2", None, None),
        "no group": ("bfloat16",) * 2
        + ("nothing tells that their ranks have one scale: pass option 'amax_group'",) * 2,
        "own scales": ("bfloat16",) * 2
        + ("shards that are gathered in FP8 have one scale, and DelayedScaling(reduce_amax=False) gives each own",) * 2,
    }
    for found in told["reasons"]:
        for case, (of_x, of_dy, why_x, why_dy) in expected.items():
            lines = [
                template.format(dtype) + (f": {why}" if why else "")
                for template, dtype, why in ((x, of_x, why_x), (dy, of_dy, why_dy))
            ]
            assert found[case] == lines
        assert found["negates"] == [None, None]  # its gradient is not that of an exchange
