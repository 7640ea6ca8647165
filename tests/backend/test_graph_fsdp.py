"""Models that gather their own weights in the graph: real processes, gloo, CPU. Cases: graph_fsdp_ranks.py. Weights
that are cast before they are gathered are the same, bit for bit, as those that are cast behind it."""

import pytest
import torch
from torch import fx
from torch.distributed.tensor import DTensor

from te_inductor import compat
from tests.ranks import Told, ranks, told_by

QUICK = "mixed current,reshards delayed,reasons,masked"
OTHERS = (
    "plain current,plain delayed,plain block,blocks current,blocks delayed,checkpointed current,checkpointed delayed,"
    "checkpointed block,frozen current,frozen delayed,twice current,twice delayed,mixed delayed,mixed block,"
    "reshards current,reshards block,not_finite current,"
    "not_finite delayed,not_finite block,compiled plain current,compiled reshards delayed"
)
FOUR = "mixed current,mixed delayed,mixed block,hsdp current,hsdp delayed,reshards current"


MODULE = "tests.backend.graph_fsdp_ranks"
told = told_by(MODULE, 2, QUICK)
others = told_by(MODULE, 2, OTHERS, timeout=900)


def told_of(kind: str, request: pytest.FixtureRequest) -> list:
    """What the ranks told, by rank, from the program that ran it."""
    return request.getfixturevalue("told" if kind in QUICK else "others")[kind]


@pytest.mark.parametrize("kind", QUICK.split(",")[:-2])
def test_training_is_the_same(kind, told):
    check(kind, told)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHERS.split(","))
def test_training_is_the_same_too(kind, others):
    check(kind, others)


@pytest.mark.thorough
def test_training_is_the_same_on_four_ranks():
    found = ranks(MODULE, 4, FOUR, timeout=900)
    for kind in FOUR.split(","):
        check(kind, found)


def check(kind: str, told: Told) -> None:
    assert not any(told.said(kind))
    for found in told[kind]:
        if kind.startswith("not_finite"):
            assert found is True
            continue
        if kind.startswith("compiled reshards"):  # generated code leaves out roundings to bf16, others in each graph
            assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.05)
            continue
        assert found["same"]
        if "compiled" not in kind:  # whose graphs nobody sees
            high, low = ([sum(graph.values()) for graph in graphs] for graphs in found["gathers"])
            assert all("uint8" in graph for graph in found["gathers"][1])
            assert sum(low) < (0.55 if kind.startswith(("mixed", "hsdp")) else 0.8) * sum(high) or "resh" in kind


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mixed current", {}),
        ("reshards delayed", {}),
        pytest.param("mixed block", {"float32": 4 * 2 * 4}, marks=pytest.mark.thorough),
    ],
)
def test_half_of_the_bytes_are_gathered(kind, more, request):
    """Two weights of 256 x 256, two bytes a value or one; a norm's and a bias, 3 rows of 256 values, stay in bf16."""
    for found in told_of(kind, request):
        [high, *_], [low, *_] = found["gathers"]
        assert high == {"bfloat16": 2 * 256 * 256 * 2 + 3 * 256 * 2}
        assert low == {"bfloat16": 3 * 256 * 2, "uint8": 2 * 256 * 256, **more}


def test_ranks_run_the_graph_of_a_first_step_together(told):
    """They do so while one of them has a layer without history, whose weight nobody gathers."""
    assert [found["reductions"] for found in told["masked"]] == [[[1, 1], [], [], []]] * 2
    off = [found["off"] for found in told["masked"]]
    assert off[1][:2] == [0.0, 0.0]
    assert max(*off[0], *off[1]) < 0.2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mixed current", [[2]]),
        ("reshards delayed", [[1, 1]]),  # of a first step alone
        pytest.param("mixed block", [], marks=pytest.mark.thorough),
    ],
)
def test_amaxes_of_all_weights_are_one_reduction(kind, expected, request):
    assert [found["reductions"] for found in told_of(kind, request)] == [expected] * 2


def test_the_backward_gathers_bytes_again_where_a_pass_says_so(told):
    for found in told["reshards delayed"]:
        _, graphs = found["gathers"]
        assert [graph["uint8"] for graph in graphs] == [2 * 256 * 256] * 4  # forward and backward, twice


REASONS = {
    "rowwise": "recipe 'rowwise' has scales of its rows for fprop and of its columns for dgrad, which no one cast gives",
    "mxfp8": "recipe 'mxfp8' has scales of its rows for fprop and of its columns for dgrad, which no one cast gives",
    "columns": "its shards are placed as (Shard(dim=1),), expected rows along one dimension of a mesh",
    "uneven": "its 321 rows are sharded unevenly over 2 ranks",
    "few": "its 118 rows of 256 columns are not multiples of 16",
    "small": "its 64 rows of 120 columns are not multiples of 16",
    "blocks": "a rank's 64 rows of 256 columns are not multiples of 128",
    "tied": "something else reads it too, in high precision",
    "own scales": "shards that are gathered in FP8 have one scale, and DelayedScaling(reduce_amax=False) gives each own",
    "group": "shards that are gathered in FP8 have one scale, and option 'amax_group' is not all of their ranks",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_is_gathered_in_high_precision_and_why(case, told):
    for wires in told["reasons"]:
        assert wires[case] == f"the graph gathers its weight in float32: {REASONS[case]}"
        assert wires["gathered"] == "the graph gathers its weight in e4m3"


def test_arguments_of_a_method_that_dynamo_hides_in_a_function():
    """torch 2.11 has methods of DTensors in its graphs so."""

    def hidden(name, args_as_value, kwargs_as_value):
        def method(x, shape=None):
            return args_as_value, kwargs_as_value

        method.__name__ = name
        return method

    graph = fx.Graph()
    x = graph.placeholder("x")
    shown = graph.call_method("redistribute", (x, "mesh"), {"forward_dtype": torch.bfloat16})
    held = graph.call_function(hidden("prim_redistribute", ["mesh"], {"forward_dtype": torch.bfloat16}), (x,))
    for node in (shown, held):
        assert compat.method_call(node) == ("redistribute", ("mesh",), {"forward_dtype": torch.bfloat16})
    shown = graph.call_function(DTensor.from_local, (x, "mesh"), {"run_check": False, "shape": (2,)})
    held = graph.call_function(hidden("prim from_local", ["mesh"], {"run_check": False}), (x,), {"shape": (2,)})
    for node in (shown, held):
        assert compat.method_call(node) == ("from_local", ("mesh",), {"run_check": False, "shape": (2,)})
    assert compat.method_call(graph.call_function(torch.relu, (x,))) is None
