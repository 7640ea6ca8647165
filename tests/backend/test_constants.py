"""Constants in generated code and in schemas: a name for each class."""

import importlib
import pkgutil

import pytest

import te_inductor
from te_inductor import compat
from te_inductor.recipes.constants import Constant, source_name


def every_constant() -> list[type]:
    pytest.importorskip("triton")
    for module in pkgutil.walk_packages(te_inductor.__path__, "te_inductor."):
        # One imports a compiler, whose constants are scaled_mm's; the others import their frameworks, and have none.
        if not module.name.startswith(("te_inductor.templates.cutlass.", "te_inductor.integrations.")):
            importlib.import_module(module.name)
    importlib.import_module("te_inductor.kernels.cutlass_tiles")
    found: list[type] = []
    waiting = Constant.__subclasses__()
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    # Not what one call makes for itself, such as the sink of a layer by hand, which stands in no graph.
    return [cls for cls in found if cls.__module__.startswith("te_inductor.") and not cls.__name__.startswith("_")]


def test_no_two_share_a_name():
    classes = every_constant()
    assert len({source_name(cls) for cls in classes}) == len(classes)
    assert len({compat.constant_type_name(cls) for cls in classes}) == len(classes)
    assert all(source_name(cls).isidentifier() for cls in classes)
    assert not any(source_name(cls)[-1].isdigit() for cls in classes)  # told apart by module and class, not by a number


def test_names_that_would_be_equal_are_told_apart():
    """A dot and an underscore are one character in an identifier, and an enum defined again has its old name."""
    places = [("one_two", "Kind"), ("one", "two_Kind"), ("one_two", "Kind")]
    classes = [type("Kind", (), {"__module__": module, "__qualname__": name}) for module, name in places]
    names = [source_name(cls) for cls in classes]
    assert names == ["te_inductor_one_two_Kind", "te_inductor_one_two_Kind_2", "te_inductor_one_two_Kind_3"]
    assert names == [source_name(cls) for cls in classes]
