"""Recipes as a JSON file holds them: a name, or a name and the fields that are not the defaults."""

import dataclasses
import enum
from typing import Any

from te_inductor import recipes
from te_inductor.errors import RecipeError, wrong_type
from te_inductor.recipes import Recipe
from te_inductor.recipes.constants import Constant


def to_json(recipe: Recipe) -> "str | dict[str, Any]":
    """What `from_json` makes the recipe of.

    Raises:
        RecipeError: a recipe of the user's own class, or with a field that JSON has nothing for.
    """
    written = {"name": recipe.name} | _changed(recipe)
    if recipe.name not in recipes.NAMES or not _is_read_as(written, recipe):
        raise RecipeError(
            f"weights are stored by {recipe!r}, expected a recipe of te_inductor.recipes, whose fields are numbers and"
            " names, as config.json holds it; save te_inductor.quantized_state_dict(model), and give load_quantized the"
            " recipe"
        )
    return written if written.keys() - {"name"} else recipe.name


def _is_read_as(written: object, recipe: Recipe) -> bool:
    try:
        return from_json(written) == recipe
    except RecipeError:
        return False


def from_json(written: object) -> Recipe:
    """The recipe that `to_json` wrote.

    Raises:
        RecipeError: it wrote something else.
    """
    if isinstance(written, dict) and isinstance(written.get("name"), str):
        default = recipes.resolve(written["name"], "recipe of a configuration")
        if default is not None:
            return _made(type(default), {key: value for key, value in written.items() if key != "name"})  # type: ignore[no-any-return]
    found = recipes.resolve(written, "recipe of a configuration")
    if found is None:
        raise RecipeError(wrong_type("a recipe of a configuration", written, "the name of one that stores weights"))
    return found


def _changed(constant: Any) -> dict[str, Any]:
    changed = {}
    for field in dataclasses.fields(constant):
        value = getattr(constant, field.name)
        if isinstance(value, Recipe):
            changed[field.name] = to_json(value)
        elif value != field.default:
            changed[field.name] = _changed(value) if isinstance(value, Constant) else getattr(value, "name", value)
    return changed


def _made(kind: Any, given: dict[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = given.keys() - fields.keys()
    if unknown:
        raise RecipeError(
            f"a configuration has {', '.join(sorted(unknown))} of {kind.__name__}, expected fields among"
            f" {', '.join(fields)}; it may be of a later version of te_inductor"
        )
    return kind(**{name: _value(fields[name].type, value) for name, value in given.items()})


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[value]
    if isinstance(kind, type) and issubclass(kind, Constant) and isinstance(value, dict):
        return _made(kind, value)
    return value
