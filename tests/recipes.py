"""The recipes that there are: tests over them take in those that come."""

import pytest

from te_inductor import recipes
from te_inductor.recipes import DelayedScaling, Recipe


def _named(name: str) -> Recipe:
    return recipes.resolve(name)  # type: ignore[return-value]


# The names of recipes of plain weights, for training and inference.
NAMES = [name for name in recipes.NAMES if name not in ("auto", "none") and not _named(name).of_stored_weights]
STATELESS = [name for name in NAMES if not isinstance(_named(name), DelayedScaling)]

every_recipe = pytest.mark.parametrize("name", NAMES)
every_stateless_recipe = pytest.mark.parametrize("name", STATELESS)


def quick(*names: str, of: list[str] = NAMES) -> pytest.MarkDecorator:
    """Every recipe, of which `make test` runs these."""
    assert set(names) <= set(of), names
    return pytest.mark.parametrize(
        "name", [name if name in names else pytest.param(name, marks=pytest.mark.thorough) for name in of]
    )


def strict(name: str) -> str:
    """`options["fallback"]` under which nothing but what is meant goes by: emulation is a fallback too."""
    recipe = recipes.resolve(name)
    return "silent" if recipe is not None and recipe.slots().fprop.microscaled else "error"
