"""Recipes: how a linear layer's tensors are stored and multiplied in low precision.

Anywhere a recipe is expected, its name will do: ``"delayed"``, ``"current"``, ``"rowwise"``, ``"block"``, ``"mxfp8"``,
``"mxfp4"``, ``"nvfp4"``, ``"nvfp4_weight_only"`` (for `quantize_`), ``"none"`` (leave the site in high precision) or
``"auto"`` (so far per-tensor current scaling, on every device)."""

from te_inductor.errors import RecipeError, unknown, wrong_type
from te_inductor.recipes.backward_precision import BackwardPrecision
from te_inductor.recipes.custom import CustomRecipe
from te_inductor.recipes.delayed import DelayedScaling
from te_inductor.recipes.formats import Format
from te_inductor.recipes.microscaled import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_inductor.recipes.quantizers import Gemm, MMParams, QParams, Quantizer
from te_inductor.recipes.recipe import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, Slots
from te_inductor.recipes.weight_only import NVFP4WeightOnly

__all__ = [
    "BackwardPrecision",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Gemm",
    "MMParams",
    "MXFP4BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "NVFP4WeightOnly",
    "QParams",
    "Quantizer",
    "Recipe",
    "Slots",
    "resolve",
]

_RECIPES: tuple[type[Recipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    MXFP4BlockScaling,
    NVFP4BlockScaling,
    NVFP4WeightOnly,
)
_BY_NAME = {recipe.name: recipe for recipe in _RECIPES}
NAMES = ("auto", "none", *_BY_NAME)
# What others call a recipe, and a class's name as a string: no name here is near enough for a guess by letters.
_FP8 = "FP8 with one scale a tensor is 'current', or 'delayed'; a scale a row 'rowwise', a block 'block'"
_MEANT = dict.fromkeys(("fp8", "FP8", "float8", "hybrid", "tensorwise", "e4m3"), _FP8) | {
    recipe.__name__: f"its name is {recipe.name!r}, or pass an instance: recipes.{recipe.__name__}()"
    for recipe in _RECIPES
}


def resolve(spec: object, name: str = "recipe") -> Recipe | None:
    """The recipe that a name or instance means; None for ``"none"``.

    ``"auto"`` is per-tensor current scaling on every device with FP8 GEMMs. `name` is what errors call it.

    Raises:
        RecipeError: unknown name (naming the nearest), or an object that is no recipe.
    """
    if isinstance(spec, Recipe):
        if type(spec) is Recipe:
            spec.slots()  # the abstract base refuses itself
        return spec
    if isinstance(spec, type) and issubclass(spec, Recipe):
        raise RecipeError(f"{name} is the class {spec.__name__}, expected an instance: {spec.__name__}()")
    if not isinstance(spec, str):
        raise RecipeError(wrong_type(name, spec, f"a Recipe instance or one of {', '.join(NAMES)}"))
    if spec == "none":
        return None
    if spec == "auto":
        return Float8CurrentScaling()
    if spec in _MEANT:
        raise RecipeError(f"unknown {name} {spec!r}; {_MEANT[spec]}")
    if spec not in _BY_NAME:
        raise RecipeError(unknown(name, spec, NAMES))
    return _BY_NAME[spec]()
