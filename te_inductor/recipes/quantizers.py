"""What an op needs to know to quantize a tensor or to multiply quantized ones: constants, no state."""

import math

from te_inductor.errors import RecipeError, wrong_type
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import ELEMENTS, SCOPES, Element, Scope

# Both operands of a GEMM are stored with their contraction dimension last and padded with zeros to this many elements:
# cuBLASLt's fp8 GEMM wants 16-byte rows. A zero contributes nothing to a sum, so padding is exact.
ALIGNMENT = 16


def padded(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT; works on symbolic sizes, and leaves known multiples as they are."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@constant
class Quantizer(Constant):
    """One fp32 scale for the whole tensor or for each of its rows, from the amax of those same values ("current" scaling).

    A copy is scaled along its own rows, and both copies of a tensor are cast from high precision: the columnwise copy of
    an (R, C) tensor has C rows, hence C scales.

    Invariant: ``x ~= data.float() * scale_inv``, off by at most half a step of `element` where nothing saturates.

    Source of the arithmetic: TransformerEngine, common/recipe/recipe_common.cuh; docs/numerics.md states it.
    """

    element: str  # "e4m3" or "e5m2"
    amax_epsilon: float = 0.0  # lower bound on amax
    power_2_scale: bool = False  # round the encode scale down to a power of two
    scope: str = "tensor"  # what shares one scale: "tensor" or "row"

    def __post_init__(self) -> None:
        for name, value, known in (("element", self.element, ELEMENTS), ("scope", self.scope, SCOPES)):
            if value not in known:
                raise RecipeError(f"{name} {value!r}, expected one of {', '.join(known)}")

    @property
    def format(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def granularity(self) -> Scope:
        return SCOPES[self.scope]


@constant
class Gemm(Constant):
    """One of the three GEMMs of a linear layer, ``out[M, N] = a[M, K] @ b[N, K].T * a_scale_inv * b_scale_inv.T``."""

    name: str  # "fprop", "dgrad", "wgrad"
    fast_accum: bool = False  # CUDA: accumulate in the tensor core's own precision instead of promoting to fp32


@constant
class QParams(Constant):
    """How one kind of tensor is quantized; TransformerEngine's name, fields and defaults."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.power_2_scale, bool):
            raise RecipeError(wrong_type("QParams.power_2_scale", self.power_2_scale, "a bool"))
        check_epsilon("QParams.amax_epsilon", self.amax_epsilon)

    def quantizer(self, element: Element) -> Quantizer:
        return Quantizer(element.name, float(self.amax_epsilon), self.power_2_scale)


def check_epsilon(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(wrong_type(name, value, "a number"))
    if not (math.isfinite(value) and value >= 0):
        raise RecipeError(f"{name} is {value}, expected a finite number >= 0")


@constant
class MMParams(Constant):
    """How one GEMM accumulates; TransformerEngine's name, field and default."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.use_split_accumulator, bool):
            raise RecipeError(wrong_type("MMParams.use_split_accumulator", self.use_split_accumulator, "a bool"))

    def gemm(self, name: str) -> Gemm:
        return Gemm(name, fast_accum=not self.use_split_accumulator)
