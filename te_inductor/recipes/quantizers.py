"""What an op needs to know to quantize a tensor or to multiply quantized ones: constants, no state."""

import itertools
import math
import operator
from dataclasses import fields, replace

import torch

from te_inductor.errors import RecipeError, wrong_type
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import (
    E2M1,
    E4M3,
    E5M2,
    ELEMENTS,
    NV_1X16,
    ROW,
    SCOPES,
    TENSOR,
    Division,
    Element,
    Scope,
    padded,
)

HIGH = "high_precision"  # in the place of an element's name: an operand that is not cast
METRICS = ("MAE", "MSE")  # a block's error: the sum of its values' errors, or of their squares


@constant
class Quantizer(Constant):
    """One scale for what a `Scope` says shares one, from the amax of those same values ("current" scaling).

    A copy is scaled along its own rows, and both copies of a tensor are cast from high precision: the columnwise copy
    of an (R, C) tensor has C rows, hence C scales, or C for each block of 128 of R.

    Invariant: ``x ~= data.float() * expand(scale_inv)``, off by at most half a step of `element` where nothing
    saturates; times ``amax / (6 * 448)`` where scales have two levels (``amax / two_level_max``).

    Source of the arithmetic: TransformerEngine, common/recipe/recipe_common.cuh, common/util/ptx.cuh,
    common/cast/nvfp4/core_nvfp4.cuh; docs/numerics.md states it.
    """

    element: str  # a name in `formats.ELEMENTS`
    amax_epsilon: float = 0.0  # lower bound on amax; of fp32 scales
    power_2_scale: bool = False  # round the encode scale down to a power of two; of fp32 scales
    scope: str = "tensor"  # what shares one scale: a name in `formats.SCOPES`
    hadamard: bool = False  # the columnwise copy is of the transposed tensor behind `ops.hadamard`; of E2M1
    stochastic: bool = False  # round up or down at random, so that the mean is right; of E2M1
    factor_scope: str = TENSOR.name  # what has a factor, the first of two levels: "tensor", or "row", each of a copy's
    candidates: tuple[float, ...] = ()  # what a block's amax may go to; (): the element's largest; of two-level scales
    error_metric: str = ""  # by which the candidate with the least error is taken: a name in `METRICS`
    scale_max: float = E4M3.max  # of the block with the amax, at the element's largest; 256 beside candidates too

    def __post_init__(self) -> None:
        for name, value, known in (("element", self.element, ELEMENTS), ("scope", self.scope, SCOPES)):
            if value not in known:
                raise RecipeError(f"{name} {value!r}, expected one of {', '.join(known)}")
        if self.element not in self.granularity.elements:
            raise RecipeError(
                f"element {self.element!r} with scope {self.scope!r}, expected one of {', '.join(self.granularity.elements)}"
            )
        if (self.hadamard or self.stochastic) and self.format is not E2M1:
            raise RecipeError(f"hadamard or stochastic with element {self.element!r}, expected {E2M1.name!r}")
        self._check_factors()
        self._check_candidates()
        if self.granularity.microscaled and (self.amax_epsilon or self.power_2_scale):
            raise RecipeError(
                f"amax_epsilon or power_2_scale with scope {self.scope!r}, expected neither: its format says how an"
                " amax becomes a scale"
            )

    def _check_factors(self) -> None:
        if self.factor_scope not in (TENSOR.name, ROW.name):
            raise RecipeError(f"factor_scope {self.factor_scope!r}, expected {TENSOR.name!r} or {ROW.name!r}")
        if self.rows_have_factors and (self.scope != NV_1X16.name or self.hadamard or self.stochastic):
            raise RecipeError(
                f"factor_scope {ROW.name!r} beside scope={self.scope!r}, hadamard={self.hadamard} and"
                f" stochastic={self.stochastic}, expected 1x16, NVFP4's, and neither of the others"
            )

    def _check_candidates(self) -> None:
        if self.error_metric not in (METRICS if self.candidates else ("",)):
            expected = " or ".join(map(repr, METRICS)) if self.candidates else "'' without candidates"
            raise RecipeError(f"error_metric {self.error_metric!r}, expected {expected}")
        if self.scale_max not in ((E4M3.max, 256.0) if self.candidates else (E4M3.max,)):
            raise RecipeError(f"scale_max {self.scale_max}, expected 448, or 256 beside candidates")
        if not self.candidates:
            return
        if not isinstance(self.candidates, tuple):
            raise RecipeError(wrong_type("candidates", self.candidates, "a tuple"))
        if not (self.granularity.two_level and self.format is E2M1):
            raise RecipeError(
                f"candidates with element {self.element!r} and scope {self.scope!r}, expected NVFP4's, e2m1 with 1x16"
                " or 16x16"
            )
        falling = all(a > b > 0 for a, b in itertools.pairwise(self.candidates))
        if len(self.candidates) < 2 or self.candidates[0] != self.format.max or not falling:
            raise RecipeError(
                f"candidates {self.candidates}, expected {self.format.max:g}, the largest value of {self.element!r}, and"
                " then smaller ones"
            )
        if self.hadamard or self.stochastic:
            raise RecipeError(
                f"candidates beside hadamard={self.hadamard} and stochastic={self.stochastic}, expected neither, as"
                " TransformerEngine has neither"
            )

    @property
    def format(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def granularity(self) -> Scope:
        return SCOPES[self.scope]

    @property
    def rows_have_factors(self) -> bool:
        """Whether each row of a copy has a factor of its own, the first of two levels."""
        return self.factor_scope == ROW.name

    @property
    def copies_apart(self) -> bool:
        """Whether each copy is cast by itself: of other values, with other random bits, or with other factors."""
        return self.hadamard or self.stochastic or self.rows_have_factors

    def label(self, *, columnwise: bool) -> str:
        """How a report names what has become of a tensor's copy."""
        parts = [self.element, self.scope]
        if self.candidates:
            parts.append(f"{' over '.join(f'{value:g}' for value in reversed(self.candidates))}, {self.error_metric}")
        parts += ["transformed"] if self.hadamard and columnwise else []
        return " ".join(parts + (["stochastic"] if self.stochastic else []))

    @property
    def two_level_max(self) -> float:
        """What two-level scales map the tensor's amax to: the largest element times the largest scale of a block."""
        return self.format.max * self.scale_max

    def padded(self, columns: int, *, floordiv: Division = operator.floordiv) -> int:
        """How many columns a copy of so many has, with its padding."""
        return padded(columns, self.granularity.alignment, floordiv=floordiv)

    def stored(self, columns: int) -> int:
        """How many it is stored as, where several values are one byte."""
        return self.padded(columns) // self.format.packed

    def largest_scale(self, dtype: torch.dtype) -> float:
        """What stands for an encode scale that is infinite, of a tensor of `dtype`."""
        return torch.finfo(dtype if self.granularity.blocked else torch.float32).max


@constant
class Gemm(Constant):
    """One of the three GEMMs of a linear layer, ``out[M, N] = (a * a_scale_inv)[M, K] @ (b * b_scale_inv)[N, K].T``."""

    name: str  # "fprop", "dgrad", "wgrad"
    fast_accum: bool = False  # CUDA: accumulate in the tensor core's own precision instead of promoting to fp32
    scopes: tuple[str, str] = ("tensor", "tensor")  # what shares one scale in a and in b
    elements: tuple[str, str] = ("e4m3", "e4m3")  # of a and of b
    scale_maxima: tuple[float, float] = (E4M3.max, E4M3.max)  # Quantizer.scale_max of a and of b
    fixed_order: bool = False  # whether an element is summed alike whatever M is: Note [One order of sums]

    def __post_init__(self) -> None:
        if not SCOPES.keys() >= set(self.scopes):
            raise RecipeError(f"{self.name} of scopes {self.scopes}, expected of {', '.join(SCOPES)}")
        if self.is_high:
            return
        for element, scope in zip(self.elements, self.granularities, strict=True):
            if element not in scope.elements:
                raise RecipeError(
                    f"{self.name} of elements {self.elements} with scopes {self.scopes}, expected one of"
                    f" {', '.join(scope.elements)} with scope {scope.name!r}"
                )
        if self.formats[0].packed != self.formats[1].packed:
            raise RecipeError(f"{self.name} of elements {self.elements}, expected as many bits in both")

    @classmethod
    def of(cls, name: str, a: Quantizer, b: Quantizer, fast_accum: bool = False) -> "Gemm":
        """The GEMM of operands that these have cast."""
        return cls(name, fast_accum, (a.scope, b.scope), (a.element, b.element), (a.scale_max, b.scale_max))

    @classmethod
    def of_high_precision(cls, name: str) -> "Gemm":
        """The GEMM of tensors as they are; their scales are 1."""
        return cls(name, elements=(HIGH, HIGH))

    @property
    def is_high(self) -> bool:
        """Whether its operands are not cast. They have no formats then."""
        return self.elements == (HIGH, HIGH)

    @property
    def transposes(self) -> bool:
        """Whether every device has the GEMM of the transposed result too. Square blocks belong on the right, and torch's
        kernel of FP8 with scales of rows takes E5M2 on the left alone (RowwiseScaledMM.cu)."""
        a, b = self.scopes
        return a == b and not (a == ROW.name and self.formats[0] is E5M2)

    @property
    def transposed(self) -> "Gemm":
        """The GEMM of the transposed result, of the same operands in the other order."""
        orders = {name: getattr(self, name)[::-1] for name in ("scopes", "elements", "scale_maxima")}
        return replace(self, **orders)

    @property
    def formats(self) -> tuple[Element, Element]:
        a, b = self.elements
        return ELEMENTS[a], ELEMENTS[b]

    @property
    def two_level_max(self) -> float:
        """The product of `Quantizer.two_level_max` of a and of b."""
        return math.prod(element.max for element in self.formats) * math.prod(self.scale_maxima)

    @property
    def packed(self) -> int:
        """Values in a stored byte of either operand."""
        return 1 if self.is_high else self.formats[0].packed

    @property
    def granularities(self) -> tuple[Scope, Scope]:
        a, b = self.scopes
        return SCOPES[a], SCOPES[b]

    @property
    def blocked(self) -> bool:
        """Whether scales change along K."""
        return any(scope.blocked for scope in self.granularities)

    @property
    def microscaled(self) -> bool:
        """Whether its operands are MXFP8 or NVFP4."""
        return any(scope.microscaled for scope in self.granularities)


@constant
class QParams(Constant):
    """How one kind of tensor is quantized; TransformerEngine's name, fields and defaults."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def quantizer(self, element: Element, scope: str = "tensor") -> Quantizer:
        return Quantizer(element.name, float(self.amax_epsilon), self.power_2_scale, scope)


def check_fields(constant: Constant) -> None:
    """Checks that fields are what they are annotated as, where that is a class. A float is a finite number, no less than
    0."""
    for field in fields(constant):  # type: ignore[arg-type]
        name, value, expected = f"{type(constant).__name__}.{field.name}", getattr(constant, field.name), field.type
        if expected is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RecipeError(wrong_type(name, value, "a number"))
            if not (math.isfinite(value) and value >= 0):
                raise RecipeError(f"{name} is {value}, expected a finite number >= 0")
        elif isinstance(expected, type) and (
            not isinstance(value, expected) or (expected is int and isinstance(value, bool))
        ):
            raise RecipeError(wrong_type(name, value, f"a {expected.__name__}"))


@constant
class MMParams(Constant):
    """How one GEMM accumulates; TransformerEngine's name, field and default."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def gemm(self, name: str, a: Quantizer, b: Quantizer) -> Gemm:
        """The GEMM of operands that these have cast."""
        return Gemm.of(name, a, b, fast_accum=not self.use_split_accumulator)
