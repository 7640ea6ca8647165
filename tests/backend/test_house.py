"""The structure of the package, by the figures of `python -m tests.house`. Bounds only go down."""

import ast

import pytest

from tests import house, prose

LONGEST_FUNCTION = 49
LARGEST_RECORD = 15
CYCLES = 0  # pairs of folders that import each other
# Names that mean several things in the package: users import a callback of each framework.
REPEATED_CLASSES = frozenset(("ScalingStateCallback", "StatisticsCallback"))


def test_functions_and_records_stay_small():
    for bound, figure in (LONGEST_FUNCTION, house.longest_function()), (LARGEST_RECORD, house.fields()):
        assert figure.value <= bound, figure.parts[0]


def test_no_more_folders_import_each_other():
    found = house.cycles()
    assert found.value <= CYCLES, found.parts


def test_a_class_name_means_one_thing():
    found = house.repeated_classes().parts
    assert {line.partition(":")[0] for line in found} <= REPEATED_CLASSES, found


def test_no_docstring_and_no_comment_is_a_fragment():
    assert not house.fragments().parts, "python -m tests.house --list names the places"


def test_every_hop_of_a_walk_is_where_the_page_says():
    walks = house.walks()
    assert len(walks) == 4 and all(len(hops) > 8 for hops in walks.values())
    for path, name in {hop for hops in walks.values() for hop in hops}:
        defined = {getattr(node, "name", None) for node in ast.walk(house.trees()[path])}
        assert name in defined, f"docs/walks.md: {name} is not in {path}"


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("Of names of one tensor.", True),
        ("As TransformerEngine has it.", True),
        ("Returns the amax of each row.", False),
        ("The sites of a graph.", False),
        ("Whether the weight is stored.", False),
        ("``x @ w.T``.", False),
    ],
)
def test_what_is_a_fragment(text, fragment):
    assert prose.is_fragment(text) == fragment


def test_fragments_are_found_in_docstrings_and_comments(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('"""Of nothing."""\n\n# Of a,\n# of b.\nx = 1  # of c\n')
    assert [opening.line for opening in prose.fragments(path)] == [1, 3]
