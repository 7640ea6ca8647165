"""CustomRecipe: a user's own choice of quantizers, slot by slot and layer by layer."""

from collections.abc import Callable
from typing import Any, ClassVar

from te_inductor.errors import RecipeError, wrong_type
from te_inductor.recipes.constants import constant
from te_inductor.recipes.formats import E4M3, E5M2
from te_inductor.recipes.quantizers import Gemm, MMParams, Quantizer
from te_inductor.recipes.recipe import Recipe, Slots

# What a slot holds where the factory returns None, and each GEMM's operands.
_TENSORS = {"input": Quantizer(E4M3.name), "weight": Quantizer(E4M3.name), "grad_output": Quantizer(E5M2.name)}
_GEMMS = {
    "fprop": (MMParams(use_split_accumulator=False), "input", "weight"),
    "dgrad": (MMParams(use_split_accumulator=True), "grad_output", "weight"),
    "wgrad": (MMParams(use_split_accumulator=True), "grad_output", "input"),
}


@constant
class CustomRecipe(Recipe):
    """Low precision as a user's function says: ``factory(slot, module)`` for each slot of each linear layer.

    `slot` is a tensor, ``"input"``, ``"weight"`` or ``"grad_output"``, for which the factory returns a `Quantizer`, or
    a GEMM, ``"fprop"``, ``"dgrad"`` or ``"wgrad"``, for which it returns `MMParams`; None is what Float8CurrentScaling
    has there (Float8BlockScaling, for a GEMM of operands with scales of blocks). `module` is the layer's module path,
    as in `model.named_modules()`. The factory is called while a graph is compiled, and stands in the compile caches'
    keys by its code and default arguments: it has to be a plain function without a closure that returns the same for
    the same arguments. Leave a layer in high precision by policy, not here.

    TransformerEngine's CustomRecipe has a factory of quantizer objects with kernels of their own; here it chooses among
    the quantizers that there are.

    Raises:
        RecipeError: no plain function; or, when compiled, what the factory raised, returned, or combined in one GEMM.
    """

    name: ClassVar[str] = "custom"

    factory: Callable[[str, str], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.factory):
            raise RecipeError(wrong_type("CustomRecipe.factory", self.factory, "a function of slot and module path"))
        self.__fx_repr__()  # refuses a function that no cache key can stand for

    def slots(self) -> Slots:
        """The slots of a layer outside any module."""
        return self.slots_at("")

    def slots_at(self, module: str) -> Slots:
        tensors = {slot: self._made(slot, module, default) for slot, default in _TENSORS.items()}
        gemms = {}
        for name, (default, *operands) in _GEMMS.items():
            what, (a, b) = f"CustomRecipe, {name} of {module or '(root)'}", (tensors[operand] for operand in operands)
            _check_operands(what, a, b)
            if a.granularity.blocked:
                default = MMParams(use_split_accumulator=True)
            gemms[name] = self._made(name, module, default).gemm(name, a, b)
            _check_accumulation(what, gemms[name])
        return Slots(**tensors, **gemms)

    def _made(self, slot: str, module: str, default: Any) -> Any:
        try:
            made = self.factory(slot, module)
        except Exception as error:
            raise RecipeError(
                f"CustomRecipe's factory raised {type(error).__name__} for slot {slot!r} of {module or '(root)'}:"
                f" {error}"
            ) from error
        if made is None:
            return default
        if not isinstance(made, type(default)):
            name = f"what CustomRecipe's factory returned for slot {slot!r} of {module or '(root)'}"
            raise RecipeError(wrong_type(name, made, f"a {type(default).__name__} or None"))
        return made


def _check_operands(what: str, a: Quantizer, b: Quantizer) -> None:
    """Whether a GEMM library multiplies such operands."""
    if a.element == b.element == E5M2.name:
        raise RecipeError(f"{what}: both operands are e5m2, expected at most one")
    one, other = a.granularity, b.granularity
    if one != other and not (one.blocked and one.block[1] == other.block[1]):
        raise RecipeError(
            f"{what}: scopes {a.scope!r} and {b.scope!r}, expected the same, or blocks of as many columns"
        )
    if one.block[0] > 1 and other.block[0] > 1:
        raise RecipeError(f"{what}: scopes {a.scope!r} and {b.scope!r}, expected at most one of square blocks")


def _check_accumulation(what: str, gemm: Gemm) -> None:
    if gemm.blocked and gemm.fast_accum:
        raise RecipeError(
            f"{what}: use_split_accumulator=False, expected True: block scales are applied where partial sums are"
            " promoted to fp32"
        )
