"""What `make test` leaves to `make test-all`, and the faults that are to be found by it."""

import itertools
import random

import pytest

from tests.forked import ROOT
from tests.mutations import MUTATIONS
from tests.mutations.mutation import place_of
from tests.rounds import sample


@pytest.mark.parametrize("together", [1, 2])
def test_a_sample_has_every_combination(together):
    sizes = {"recipe": 6, "dtype": 3, "bias": 2, "layout": 4}
    cases = [dict(zip(sizes, case, strict=True)) for case in itertools.product(*map(range, sizes.values()))]
    random.Random(0).shuffle(cases)
    chosen = [cases[number] for number in sample(cases, together)]
    for names in itertools.combinations(sizes, together):
        found = {tuple(case[name] for name in names) for case in chosen}
        assert found == set(itertools.product(*(range(sizes[name]) for name in names)))
    assert len(chosen) <= {1: 8, 2: 36}[together] < len(cases)


def test_cases_that_were_left_out_are_no_combinations():
    """The parametrization is no product."""
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]
    assert sample(cases, 2) == {0, 1, 2}
    assert sample([{"a": 0}, {"a": 1}], 2) == {0, 1}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_has_its_place(mutation):
    """The mutations would otherwise check nothing: a line that changes takes its mutation along."""
    assert place_of(mutation.text, ROOT / "te_inductor") is not None
    assert mutation.text != mutation.becomes
    assert (ROOT / mutation.first[0]).exists()


def test_cases_that_are_named_exist(request):
    """The quick round would otherwise run none of them."""
    found: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for item in request.session.items:
        if (named := item.get_closest_marker("quick")) is not None:
            found.setdefault((item.nodeid.partition("[")[0], named.args), set()).add(item.callspec.id)
    for (name, ids), cases in found.items():
        assert set(ids) <= cases, name


@pytest.mark.sample(1)
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_is_not_in_the_sample_is_thorough(first, second, request):
    cases = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert sum(item.get_closest_marker("thorough") is None for item in cases) <= 3
