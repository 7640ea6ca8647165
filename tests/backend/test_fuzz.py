"""Random models under random recipes, policies, options and modes (tests/fuzz.py), most compiled without code
generation.

``make test`` checks 6 of them and ``make test-all`` 96, always the same; ``make fuzz`` as many as ``--cases`` says and,
compiled, as ``--compiled`` says, others with each ``--seed``.
What it finds becomes a regression test here.
"""

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests import fuzz
from tests.support.random_models import Case, cases

pytestmark = pytest.mark.usefixtures("without_codegen")

PARTS = 16  # which workers of pytest-xdist share; make test checks one


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, PARTS))])
def test_random_models(part, request):
    check_random(request.config.getoption("--seed") * PARTS + part, request.config.getoption("--cases") // PARTS)


@pytest.mark.codegen
def test_random_models_compiled(request):
    """Checks random models with code generation, which takes half a minute a case."""
    count = request.config.getoption("--compiled")
    if not count:
        pytest.skip("no --compiled")
    check_random(request.config.getoption("--seed"), count, generated=True)


def check_random(start: int, count: int, **how) -> None:
    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(cases)
    def run(case):
        fuzz.check(case, **how)

    run()


def test_a_kept_weight_whose_rows_are_not_whole_words():
    fuzz.check(
        Case(steps=(("linear", 16, True),), width=130, leading=(7,), recipe="current", dtype="bfloat16", weights="once")
    )


def test_a_checkpoint_in_eager_code():
    """Saved tensors are unpacked once: torch's checkpoint, under the eager reference, allows no second time."""
    fuzz.check(Case(steps=(("checkpoint", (("linear", 16, False),)),), width=16, leading=(1,), recipe="current"))


@pytest.mark.parametrize("step", ["checkpoint", "amp"])
def test_experts_in_eager_code(step):
    """Experts are checked in eager code, and under torch.autocast, which has no opinion on FP8."""
    steps = ((step, (("experts", 32, 3),)),)
    fuzz.check(Case(steps=steps, width=16, leading=(2, 5), recipe="rowwise"))


def test_experts_of_rows_that_were_widened():
    """Their gradients are added up in fp32, and rounded once."""
    steps = (("amp", (("linear", 96, True), ("experts", 96, 8))),)
    fuzz.check(Case(steps=steps, width=32, leading=(3, 1, 4), recipe="current, E4M3"))


def test_an_einsum_of_symbolic_sizes():
    """Such an einsum stayed in high precision, without a word."""
    fuzz.check(
        Case(steps=(("residual", (("einsum", "plain", 16),)),), width=16, leading=(1,), recipe="delayed", dynamic=True)
    )


def test_an_einsum_of_a_frozen_weight():
    """The sizes are symbolic, which torch 2.11 takes there from Python's dispatcher alone: the pass failed."""
    steps = (("reshape", "unsqueeze"), ("einsum", "rows behind", 130))
    fuzz.check(Case(steps=steps, width=40, leading=(7,), recipe="current", frozen=2, x_grad=False, dynamic=True))


def test_an_einsum_in_high_precision():
    """It runs as it is written: F.linear, which took its place, sums in another order."""
    fuzz.check(
        Case(
            steps=(
                ("reshape", "reversed copy"),
                ("norm", "layer"),
                ("einsum", "of heads", 16),
                ("written", "weight", (64, 130), False),
            ),
            width=32,
            leading=(7,),
            recipe="delayed",
            frozen=2,
            around="none",
            weights="once",
            wgrad="deferred",
            seed=248,
        )
    )


def test_the_gradient_of_a_transposed_output():
    """AOTAutograd lays it out anew: another order of an einsum's sums in high precision, by which results were off."""
    fuzz.check(
        Case(steps=(("linear", 32, True), ("einsum", "rows behind", 128)), width=16, leading=(7,), recipe="none")
    )


def test_lists_written_under_a_memory_budget():
    """The sizes are symbolic: the backward computed the list again, of what had been written."""
    steps = (("written", "list", (16, 16), False),)
    fuzz.check(Case(steps=steps, width=16, leading=(2, 5), recipe="block", dynamic=True, budget=0.5))


def test_a_weight_used_twice_under_autocast():
    """It is in high precision: autocast's cache, which tracing does without, has eager code add the gradients in
    bf16."""
    fuzz.check(Case(steps=(("amp", (("twice",),)),), width=16, leading=(7,), recipe="none"))


def test_a_first_step_that_writes_an_inference_tensor():
    """Such tensors count no versions, which the step was to keep as they are."""
    fuzz.check(
        Case(
            steps=(("twice",), ("norm", "layer"), ("written", "weight", (16, 16), False)), width=16, leading=(1,),
            recipe="delayed", policy=(("*", "delayed"),), dtype="float16", mode="inference", x_grad=False, frozen=2,
            wgrad="main_grad", seed=1861, threads=2, copies=True,
        )
    )  # fmt: skip
