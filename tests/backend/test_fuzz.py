"""Random models under random recipes, policies and modes (tests/fuzz.py), compiled without code generation.

``make test`` checks 100 of them, always the same; ``make fuzz`` as many as ``--cases`` says, others with each ``--seed``.
What it finds becomes a regression test here.
"""

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests import fuzz

pytestmark = pytest.mark.usefixtures("without_codegen")

PARTS = 4  # which workers of pytest-xdist share


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models(part, request):
    count = request.config.getoption("--cases") // PARTS

    @seed(request.config.getoption("--seed") * PARTS + part)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(fuzz.cases)
    def run(case):
        fuzz.check(case)

    run()


def test_a_checkpoint_in_eager_code():
    """Saved tensors are unpacked once: torch's checkpoint, under the eager reference, allows no second time."""
    fuzz.check(fuzz.Case(steps=(("checkpoint", (("linear", 16, False),)),), width=16, leading=(1,), recipe="current"))
