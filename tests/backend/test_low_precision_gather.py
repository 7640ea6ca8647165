"""FSDP2 gathers weights in FP8: two to four real processes, gloo, CPU. Cases: gather_ranks.py."""

import contextlib
import inspect
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_inductor.distributed.fsdp.rounds import Weight
from te_inductor.errors import FallbackError, GatherError, OptionError, RecipeError
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.recipes import resolve
from tests.ranks import ranks, told_by

MODULE = "tests.backend.gather_ranks"
RECIPES = ["delayed", "current", "block"]
QUICK = "uneven delayed,accumulates delayed,traffic delayed,eager current,policy,mismatch,refusals,other_weights,other_state"
EQUAL = (
    "blocks", "whole_model", "mixed_precision", "accumulates", "frozen", "stays_gathered", "checkpointed", "not_finite",
    "meta", "without_gradients", "uneven", "compiled_casts", "compiled blocks", "compiled stays_gathered",
)  # fmt: skip
OTHERS = [
    f"{case} {recipe}" for case in (*EQUAL, "checkpoints", "skipped", "traffic", "saves", "eager") for recipe in RECIPES
]


def each_recipe(quick: str) -> pytest.MarkDecorator:
    """Marks a test with each recipe, of which `make test` runs one."""
    marks = {recipe: () if recipe == quick else pytest.mark.thorough for recipe in RECIPES}
    return pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=marks[recipe]) for recipe in RECIPES])


def told_of(case: str, request: pytest.FixtureRequest) -> list:
    """What the ranks told, by rank, from the program that ran it."""
    return request.getfixturevalue("told" if case in QUICK else "others")[case]


told = told_by(MODULE, 2, QUICK)
others = told_by(MODULE, 2, ",".join([*OTHERS, "parts", "absent"]), timeout=900)
four = told_by(MODULE, 4, ",".join([*(f"hsdp {recipe}" for recipe in RECIPES), "refusals"]))


@each_recipe("delayed")
def test_training_is_equal_bit_for_bit(recipe, request):
    """Losses and parameters equal those with weights which FSDP2 gathers itself, where shards cut blocks of 128
    rows."""
    assert told_of(f"uneven {recipe}", request) == [True, True]


def test_microbatches_are_one_step_of_a_weight(told):
    """Its state is that of a weight which FSDP2 gathers itself, where a microbatch reduces no gradients."""
    assert told["accumulates delayed"] == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_that_a_step_leaves_out_has_fresh_scales(recipe, request):
    assert told_of(f"skipped {recipe}", request) == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", EQUAL)
def test_training_is_equal_with(case, recipe, others):
    assert others[f"{case} {recipe}"] == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_of_unequal_length(recipe):
    """Three ranks, and rows that three does not divide."""
    assert ranks(MODULE, 3, f"uneven {recipe}")[f"uneven {recipe}"] == [True] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_replicated_shards(recipe, four):
    """HSDP: two replicas of two shards."""
    assert four[f"hsdp {recipe}"] == [True] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_tensor_parallel_layers(recipe):
    """Two shards of each of two parts, whose scale is the part's own; under delayed scaling that of the whole weight."""
    case = f"tensor_parallel {recipe}"
    assert ranks(MODULE, 4, case)[case] == [True] * 4


@pytest.mark.thorough
def test_parts_that_are_called_without_the_model_have_fresh_scales(others):
    assert others["parts"] == [True, True]


@each_recipe("delayed")
def test_bytes_on_the_wire_halve(recipe, request):
    """The block has K = 256 and N = 384: two weights in one byte a value, a norm and a bias in bf16. The other rank's
    half is what comes over the wire."""
    weights, vectors = 2 * 256 * 384, 2 * 256 + 384
    for one in told_of(f"traffic {recipe}", request):
        assert one["bf16"] == [(2 * weights + 2 * vectors) // 2] * 8  # two blocks, two steps, forward and backward
        assert one["fp8"] == [(weights + 2 * vectors) // 2] * 8
        assert one["casts"] == 8  # four weights, two steps; the backward gathers what the forward cast


@each_recipe("delayed")
def test_scales_of_all_weights_are_reduced_at_once(recipe, request):
    """There is one reduction a step. Under delayed scaling the blocks' graphs reduce amaxes of activations and
    gradients: one each."""
    graphs = 2 * 2 * 2 if recipe == "delayed" else 0  # steps, blocks, forward and backward
    assert [one["reductions"] for one in told_of(f"traffic {recipe}", request)] == [2 + graphs] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_backward_transposes_what_is_gathered_again(recipe, request):
    """Graphs keep, of four weights, what FSDP gathers and lets go of, no copies."""
    assert told_of(f"saves {recipe}", request) == [[4, 0], [4, 0]]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_know_nothing_of_it(recipe, request):
    """state_dict, torch.save, DCP; loading by copy and by assignment, before the first call and later; training goes on
    bit for bit, with the state of delayed scaling."""
    for one in told_of(f"checkpoints {recipe}", request):
        assert [name for name, fine in one.items() if fine is not True] == []


@each_recipe("current")
def test_eager_code_reads_what_was_gathered(recipe, request):
    for one in told_of(f"eager {recipe}", request):
        assert one.pop("type") == "GatheredWeight"
        # Half of the largest step of E4M3, 16, over the values that the largest may become: 448, or 256 and more where
        # scales are powers of two. 1e-6 is for fp32's rounding of the scale.
        assert 0 < one.pop("error") <= 16 / (256 if recipe == "block" else 448) + 1e-6
        assert "expected its shard to be changed" in one.pop("changed")
        assert "expected the module's own parameters" in one.pop("pickled")
        assert [name for name, fine in one.items() if fine is not True] == []


def test_a_policy_gives_weights_recipes_of_their_own(told):
    expected = {"0.up": "plain", "0.down": "current", "1.up": "delayed", "1.down": "delayed"}
    assert told["policy"][0] == {f"{name}.weight": recipe for name, recipe in expected.items()}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("another", "its weight was gathered for 'current', which it runs in"),
        ("none", "gathered in low precision, for 'current', and is multiplied in high precision"),
        ("policy", "multiplied in high precision; give torch.compile and low_precision_all_gather the same recipe"),
    ],
)
def test_another_recipe_than_weights_were_gathered_for_is_said(kind, text, told):
    for found in told["mismatch"]:
        [said] = found[kind]
        assert text in said


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("rowwise", RecipeError, "dgrad with one for each of its columns"),
        ("mxfp8", RecipeError, "recipe 'mxfp8' cannot gather weights in low precision, expected 'delayed'"),
        ("rows of blocks", RecipeError, "w_block_scaling_dim is 1, expected 2"),
        ("own amaxes", RecipeError, "reduce_amax is False, expected True"),
        ("unknown", RecipeError, "unknown recipe 'fp8'"),
        ("offload", GatherError, "offload_policy=CPUOffloadPolicy(), expected an offload_policy that leaves shards"),
        ("columns", FallbackError, "0.up is gathered in high precision: it is sharded along dimension 1"),
        ("sizes", FallbackError, "N=368, K=256 are not multiples of 128"),
        ("vocabulary", FallbackError, "N=250, K=256 are not multiples of 16"),
        ("tied", FallbackError, "it is also that of a module of class Embedding"),
        ("not sharded", GatherError, "call low_precision_all_gather after it"),
        ("no model", OptionError, "expected an nn.Module"),
        ("twice", GatherError, "call low_precision_all_gather once"),
        ("ran", GatherError, "before the first forward"),
        ("policy", FallbackError, "policy entry 'nobody' matches no linear layer that FSDP2 shards"),
    ],
)
def test_what_is_refused(kind, error, text, told):
    for found in told["refusals"]:
        name, _, said = found[kind].partition(": ")
        assert name == error.__name__ and text in said


@pytest.mark.thorough
def test_resharding_to_some_ranks_is_refused(four):
    for found in four["refusals"]:
        assert "an int for reshard_after_forward, expected True or False" in found["int"]


def test_ranks_that_gather_other_weights_are_an_error(told):
    for said in told["other_weights"]:
        assert "other numbers of weights in low precision (rank 0: 4, rank 1: 3)" in said


def test_ranks_with_other_scales_are_an_error(told):
    for said in told["other_state"]:
        assert "ranks have scales from 1 to 448 of one weight" in said


@pytest.mark.thorough
def test_nobody_waits_longer_than_the_groups_timeout(others):
    """The timeout is two seconds, for a rank that does not call."""
    assert 1 < others["absent"][0] < 4


def test_graphs_of_gathered_weights_have_keys_in_torchs_caches():
    """torch 2.11 pickles a graph's inputs, as they are traced, for a key; real ones are pickled by nobody."""
    recipe = resolve("current")

    def weight(rows, mode):
        with mode:
            parts = torch.zeros(rows, 128, dtype=torch.float8_e4m3fn), torch.ones(())
        return GatheredWeight(*parts, torch.Size((rows, 128)), torch.bfloat16, recipe)

    keys = [pickle.dumps(weight(rows, FakeTensorMode())) for rows in (128, 128, 256)]
    assert keys[0] == keys[1] != keys[2]
    with pytest.raises(GatherError, match="pickled"):
        pickle.dumps(weight(128, contextlib.nullcontext()))


def test_fsdp_is_told_the_signature_of_a_hook():
    """It asks for that at each gather, and Python takes longer to find it out than the hook takes to run."""
    weight = Weight("layer", None, resolve("current"), resolve("current").slots().weight)
    before, after = weight.hooks
    assert inspect.signature(before) is before.__signature__
    assert list(inspect.signature(before).parameters) == ["mesh", "outer_size", "outer_stride", "module", "mp_policy"]
    assert list(inspect.signature(after).parameters) == ["gathered", "metadata", "dtype", "out"]
