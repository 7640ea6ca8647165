"""Constants in generated code and in schemas: a name for each class."""

import importlib
import math
import pkgutil

import pytest
import torch

import te_inductor
from te_inductor import compat
from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.constants import Constant, source_name
from te_inductor.recipes.formats import Format


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


def test_compiled_code_reads_them():
    recipe = DelayedScaling(amax_history_len=4)

    def program(x):
        more = recipe.margin if recipe.fp8_format is Format.HYBRID and recipe.backward is None else 100
        return x * recipe.amax_history_len + more + len(recipe.name)

    found = torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(found, program(torch.ones(2)))


HEADROOM = 2.0


def halved(amax):
    return amax / HEADROOM


def scale_of(amax, scale, fp8_max, recipe):
    return math.sqrt(1.0) * torch.full_like(amax, fp8_max) / halved(amax)


def test_the_source_of_a_function_has_what_it_reads(monkeypatch):
    """A trace writes that into the graph, which a later process would find by its source in a compile cache. Recipes are
    equal by their functions' own code, as state is kept by them."""
    recipe, sources = DelayedScaling(scaling_factor_compute_algo=scale_of), []
    known = hash(recipe)
    for headroom in (2.0, 4.0, 2.0, object()):
        monkeypatch.setitem(globals(), "HEADROOM", headroom)
        sources.append(recipe.__fx_repr__()[0])
        assert hash(recipe) == known
    monkeypatch.setattr("te_inductor.recipes.constants._PROCESS", "another")
    sources.append(recipe.__fx_repr__()[0])
    assert sources[0] == sources[2] and len(set(sources)) == 4
    monkeypatch.setitem(globals(), "HEADROOM", 2.0)
    monkeypatch.setitem(globals(), "halved", lambda amax: amax)
    assert recipe.__fx_repr__()[0] not in sources
