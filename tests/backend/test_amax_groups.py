"""The ranks over which delayed scaling reduces its amaxes: four real processes, gloo, CPU, in groups of two. Cases:
amax_group_ranks.py, whose rank r sees an input of magnitude 1 + r. Ranks that do not agree: test_ranks.py too."""

import dataclasses
import json

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.exc import BackendCompilerFailed

import te_inductor
from te_inductor.distributed import amax_groups
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.errors import OptionError
from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.delayed import ScaleUpdate
from tests.forked import PROGRAMS
from tests.ranks import Told, told_by

OWN, DP, PP, ALL = [1, 2, 3, 4], [2, 2, 4, 4], [3, 4, 3, 4], [4, 4, 4, 4]  # the input's amax by rank
QUICK = "sharded_later,unequal"
OTHERS = (
    "mesh,hsdp,wrapped_later,stages,group,name,environment,whole_mesh,none,fsdp,fsdp_of_blocks,dtensor,ddp,ddp_ignores,two_groups_of_one_graph,ring,"
    "destroyed,refused,compiled mesh,compiled two_groups_of_one_graph,compiled ddp"
)
REMEDY = "pass options={'amax_group': …}"


MODULE = "tests.backend.amax_group_ranks"
told = told_by(MODULE, 4, QUICK)
others = told_by(MODULE, 4, OTHERS)


def about_amaxes(told: Told, kind: str) -> list[list[str]]:
    return [[text for text in said if "amaxes" in text] for said in told.said(kind)]


def by_layer(told: Told, kind: str) -> list[list[float]]:
    """What the ranks have, layer by layer; nothing was said."""
    assert not any(about_amaxes(told, kind))
    return list(map(list, zip(*told[kind], strict=True)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mesh", DP),
        ("group", PP),
        ("name", DP),
        ("environment", PP),
        ("whole_mesh", ALL),
        ("none", OWN),
        ("compiled mesh", DP),
    ],
)
def test_the_option_takes(kind, expected, others):
    """Scales are equal inside of a group, and different across. `unequal` has a mesh, too."""
    assert by_layer(others, kind) == [expected]


@pytest.mark.thorough
def test_the_default_is_the_mesh_of_the_parameter(others):
    """The default is so, too, where one of its dimensions replicates. `sharded_later` has those of one dimension."""
    assert by_layer(others, "hsdp") == [ALL]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("fsdp", [DP, DP]), ("fsdp_of_blocks", [DP, DP]), ("dtensor", [DP]), ("ddp", [DP]), ("compiled ddp", [DP])],
)
def test_the_default_is_the_group_that_shares_the_parameter(kind, expected, others):
    assert by_layer(others, kind) == expected


def served(told: Told, kind: str) -> list[list[float]]:
    """The amaxes, of three graphs. A plain model keeps each rank's own, which is no error, and is said once."""
    for said in about_amaxes(told, kind):
        assert [REMEDY in text and "layers.0" in text for text in said] == [True]
    amaxes, graphs = zip(*told[kind], strict=True)
    assert graphs == (3,) * 4
    return list(map(list, zip(*amaxes, strict=True)))


def test_a_graph_of_one_group_serves_no_other_module(told):
    """The modules are of one class."""
    assert served(told, "sharded_later") == [OWN, DP, PP, OWN]


@pytest.mark.thorough
def test_a_graph_of_one_group_serves_no_other(others):
    """The module is wrapped after its first call."""
    assert served(others, "wrapped_later") == [OWN, DP, PP]


@pytest.mark.thorough
def test_stages_of_pipelines_side_by_side(others):
    """The stages have other numbers of layers: two of the first, three of the second. Inputs, then gradients."""
    assert not any(about_amaxes(others, "stages"))
    for rank, (amaxes, graphs) in enumerate(others["stages"]):
        assert amaxes == [2] * (2 + rank // 2) + [1] * (2 + rank // 2) and graphs == 1


def test_unequal_ranks_of_one_group_keep_their_own(told):
    """The other group reduces."""
    said = about_amaxes(told, "unequal")
    assert told["unequal"] == [[1, 1], [2], [4], [4]]
    assert [len(texts) for texts in said] == [1, 1, 0, 0]
    assert all("run graphs with different quantizers at the same time" in texts[0] for texts in said[:2])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["two_groups_of_one_graph", "compiled two_groups_of_one_graph"])
def test_each_group_of_a_graph_is_reduced_by_itself(kind, others):
    assert by_layer(others, kind) == [PP, DP]


@pytest.mark.thorough
def test_what_ddp_ignores_is_each_ranks_own(others):
    for rank, (shared, own) in enumerate(others["ddp_ignores"]):
        assert shared == DP[rank] and (own == DP[rank]) == (rank % 2 == 1)
    for said in about_amaxes(others, "ddp_ignores"):
        assert ["layers.1;" in text and "layers.0" not in text for text in said] == [True]


@pytest.mark.thorough
def test_ranks_that_wait_in_a_ring_go_on(others):
    assert others["ring"] == [False] * 4 and [len(said) for said in about_amaxes(others, "ring")] == [1] * 4


@pytest.mark.thorough
def test_a_group_that_was_destroyed_is_an_error(others):
    for rank, said in enumerate(others["destroyed"]):
        assert f"rank {rank} would reduce amaxes" in said


@pytest.mark.thorough
def test_groups_of_other_ranks_are_refused(others):
    for rank, (group, mesh, name, number) in enumerate(others["refused"]):
        refused = f"that rank {rank} is not in, expected one that it is in; pass each rank its own"
        assert (refused in group, refused in mesh) == ((True, False) if rank < 2 else (False, True))
        assert "'nobody', expected" in name and "those of this rank are '0'" in name
        assert "is an int (7), expected a torch.distributed DeviceMesh, a ProcessGroup" in number


@pytest.fixture
def alone():
    """One process that plays rank 0 of four; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_what_a_group_is_known_by(alone):
    mesh = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "one"))
    dp = mesh["dp"].get_group()
    expected = AmaxGroup((0, 1), (dp.group_name,))
    assert amax_groups.resolve(dp) == amax_groups.resolve(mesh["dp"]) == amax_groups.resolve(dp.group_name) == expected
    assert amax_groups.resolve(mesh) == AmaxGroup((0, 1, 2, 3), (mesh["pp"].get_group().group_name, dp.group_name))
    assert amax_groups.resolve(mesh["one"]) == amax_groups.resolve("none") == amax_groups.OWN
    assert amax_groups.resolve(None) is None
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    with pytest.raises(OptionError, match="was destroyed, expected one that exists"):
        amax_groups.resolve(gone)


def test_a_name_without_a_process_group():
    with pytest.raises(OptionError, match=r"'0', expected .*; torch.distributed has none yet; make the group before"):
        te_inductor.explain(torch.nn.Linear(32, 32), torch.ones(16, 32), options={"amax_group": "0"})


def test_a_recipe_that_reduces_nothing_beside_a_group_is_told(alone, without_codegen):
    options = {"recipe": DelayedScaling(reduce_amax=False), "amax_group": dist.group.WORLD}
    model, x = torch.nn.Linear(32, 32), torch.ones(16, 32)
    report = te_inductor.explain(model, x, options=options)
    assert [(one.option, one.reason) for one in report.unmet] == [
        ("amax_group", "its recipe is DelayedScaling(reduce_amax=False)")
    ]
    with pytest.raises(BackendCompilerFailed, match="FallbackError: te_inductor: option 'amax_group' does not reach"):
        torch.compile(model, backend="te", options={**options, "fallback": "error"})(x)


def test_constants_of_two_groups_are_two():
    one = ScaleUpdate(DelayedScaling(), "e4m3", ("1",), "digest")
    other = dataclasses.replace(one, groups=("2",))
    assert one != other and one.__fx_repr__()[0] != other.__fx_repr__()[0]


@pytest.mark.thorough
def test_cache_keys_know_the_group(tmp_path):
    """A second compile for one group hits the caches; one for another group misses them."""
    done = PROGRAMS.run("tests.backend.amax_group_caches", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    first, again, other = json.loads(done.stdout.splitlines()[-1])
    assert first["hit"] == 0 and first["miss"] > 0
    assert again == {"hit": first["miss"], "miss": 0}
    assert other == first
