"""The precision of a backward where it is not the recipe's own: of both its GEMMs, or of each.

`BackwardPrecision` is what a user says, the field `backward` of a recipe or the option; `Operands` is what a layer knows
of one GEMM, in its `Slots`. A forward in low precision has three kinds of gradients:

- the recipe's own: dgrad and wgrad multiply copies in low precision, cast beside fprop's from the same tensors;
- those of another recipe, which casts the same tensors otherwise;
- those of autograd in high precision: dy times the weight and x themselves, or times what fprop's copies of them stand
  for, which is the derivative of what the forward has computed."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Union

from te_inductor.errors import RecipeError, unknown, wrong_type
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.quantizers import Gemm

if TYPE_CHECKING:
    from te_inductor.recipes.recipe import Recipe, Slots

HIGH_PRECISION, DEQUANTIZED = "high_precision", "dequantized"
WORDS = (HIGH_PRECISION, DEQUANTIZED)


@constant
class Operands(Constant):
    """The operands of one GEMM of a backward, where they are no copies that the layer's own slots cast: dy, and the
    weight of dgrad or the x of wgrad."""

    slots: Union["Slots", None] = None  # which cast both; None: neither is cast
    dequantized: bool = False  # the weight, or x, is what fprop's copy of it stands for


@constant
class BackwardPrecision(Constant):
    """What the two GEMMs of a backward multiply: ``"high_precision"``, the tensors themselves; ``"dequantized"``, dy
    and what fprop's copies stand for; a recipe, or its name: copies that this one casts; None: the recipe's own."""

    dgrad: Union["Recipe", str, None] = None
    wgrad: Union["Recipe", str, None] = None

    def __post_init__(self) -> None:
        for gemm in fields(self):
            object.__setattr__(self, gemm.name, _read(getattr(self, gemm.name), f"backward's {gemm.name}"))

    def name_of(self, gemm: str) -> str | None:
        """What a report calls the precision of a GEMM; None where that is the recipe's own."""
        how = getattr(self, gemm, None)
        return how if how is None or isinstance(how, str) else how.name

    def applied(self, slots: "Slots", module: str) -> "Slots":
        """The slots of the layer at this module path, with this backward in the place of their own."""
        changes: dict[str, Any] = {}
        for name in ("dgrad", "wgrad"):
            how = getattr(self, name)
            if isinstance(how, str):
                gemm, operands = Gemm.of_high_precision(name), Operands(None, how == DEQUANTIZED)
            elif how is not None:
                cast = how.slots_of(module)
                gemm, operands = getattr(cast, name), Operands(cast)
            else:
                continue
            changes |= {name: gemm, f"{name}_operands": operands}
        return replace(slots, **changes)


def resolve_backward(spec: object, name: str = "backward") -> BackwardPrecision | None:
    """The backward that is meant by a word, a recipe or its name, a mapping from GEMMs to these, or such a mapping as
    JSON; None where it is the recipe's own. `name` is what errors call it.

    Raises:
        RecipeError: an unknown word or GEMM, an object that is none of these, or a recipe that no backward can have.
    """
    if isinstance(spec, str) and spec.startswith("{"):
        try:
            spec = json.loads(spec)
        except ValueError as error:
            raise RecipeError(f"{name} is no JSON ({error}): {spec!r:.80}; expected {_EXPECTED}") from None
    if isinstance(spec, Mapping):
        for key in spec:
            if key not in ("dgrad", "wgrad"):
                raise RecipeError(unknown(f"GEMM of {name}", key, ("dgrad", "wgrad")))
        found = BackwardPrecision(*(_read(spec.get(gemm), f"{name}'s {gemm}") for gemm in ("dgrad", "wgrad")))
    else:
        found = spec if isinstance(spec, BackwardPrecision) else BackwardPrecision(*[_read(spec, name)] * 2)
    return None if found == BackwardPrecision() else found


_EXPECTED = '"high_precision", "dequantized", a recipe, or {"dgrad": …, "wgrad": …} of these'


def _read(spec: object, name: str) -> Union["Recipe", str, None]:
    from te_inductor import recipes

    if spec is None or spec in WORDS:
        return spec  # type: ignore[return-value]
    if isinstance(spec, str) and spec not in recipes.NAMES:
        raise RecipeError(unknown(name, spec, (*WORDS, *recipes.NAMES)))
    if not isinstance(spec, str | recipes.Recipe):
        raise RecipeError(wrong_type(name, spec, _EXPECTED))
    recipe = recipes.resolve(spec, name)
    if recipe is None:
        raise RecipeError(f"{name} is 'none', expected 'high_precision', of the tensors themselves, or 'dequantized'")
    if isinstance(recipe, recipes.DelayedScaling):
        raise RecipeError(
            f"{name} is recipe 'delayed', whose scales are kept for a layer that has this recipe in its forward,"
            " expected one without state, such as 'current'"
        )
    if recipe.of_stored_weights or recipe.backward is not None:
        raise RecipeError(f"{name} is {recipe}, expected a recipe of plain weights with a backward of its own")
    return recipe
