"""The recipe classes: what a user chooses, and the quantizers and GEMMs that each choice means for a linear layer."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar

from te_inductor.errors import RecipeError
from te_inductor.recipes.backward_precision import BackwardPrecision, Operands, resolve_backward
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import Format
from te_inductor.recipes.quantizers import Gemm, MMParams, QParams, Quantizer, check_fields

SPLIT = MMParams(use_split_accumulator=True)
ATTENTION = "attention is not run in FP8 here"  # why fields of TransformerEngine's are refused


@constant
class Slots(Constant):
    """Everything that the three GEMMs of one linear layer need: y = x wᵀ, dx = dy w, dw = dyᵀ x. A GEMM of the
    backward that has `Operands` multiplies those, and no copies that the quantizers here have cast."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    dgrad_operands: Operands | None = None
    wgrad_operands: Operands | None = None

    def __post_init__(self) -> None:
        if self.weight.hadamard or self.input.hadamard != self.grad_output.hadamard:
            given = ", ".join(f"{name} {getattr(self, name).hadamard}" for name in ("input", "weight", "grad_output"))
            raise RecipeError(
                f"hadamard is set for {given}, expected input and grad_output alike and no weight: the transform"
                " cancels in wgrad alone"
            )
        if self.weight.rows_have_factors or self.grad_output.rows_have_factors:
            raise RecipeError(
                "weight or grad_output has a factor for each row, expected input alone, TransformerEngine's"
            )
        if self.input.stochastic or self.weight.stochastic:
            raise RecipeError(
                "input or weight is rounded stochastically, expected grad_output alone: a checkpoint that computes the"
                " forward again would draw other bits"
            )

    @classmethod
    def of(
        cls,
        input: Quantizer,
        weight: Quantizer,
        grad_output: Quantizer,
        fprop: MMParams = SPLIT,
        dgrad: MMParams = SPLIT,
        wgrad: MMParams = SPLIT,
    ) -> "Slots":
        """The slots of a layer whose tensors are cast so, with the three GEMMs that follow."""
        return cls(
            input,
            weight,
            grad_output,
            fprop=fprop.gemm("fprop", input, weight),
            dgrad=dgrad.gemm("dgrad", grad_output, weight),
            wgrad=wgrad.gemm("wgrad", grad_output, input),
        )

    @property
    def has_own_backward(self) -> bool:
        """Whether a GEMM of the backward multiplies other operands than those that are cast here."""
        return self.dgrad_operands is not None or self.wgrad_operands is not None

    @property
    def casts_gradient(self) -> bool:
        """Whether `grad_output` casts dy, for one GEMM or for both."""
        return self.dgrad_operands is None or self.wgrad_operands is None

    @property
    def multiplies_given(self) -> bool:
        """Whether dgrad wants the weight itself, and not a copy that fprop had."""
        return self.dgrad_operands is not None and not self.dgrad_operands.dequantized

    def all(self) -> Iterator["Slots"]:
        """Yields these slots, and those that cast the operands of the backward in their place."""
        yield self
        others = (one.slots for one in (self.dgrad_operands, self.wgrad_operands) if one is not None)
        yield from dict.fromkeys(slots for slots in others if slots is not None)

    def to_text(self) -> str:
        """These, as a program's file can hold them: torch.export.save has no place for a constant of another class."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Slots":
        """What `to_text` wrote."""
        return _slots_of(text)


@functools.cache
def _slots_of(text: str) -> Slots:
    return _read(json.loads(text))


def _read(found: dict[str, dict[str, Any]]) -> Slots:
    made: dict[str, Any] = {name: Quantizer(**_fields(found[name])) for name in ("input", "weight", "grad_output")}
    for name in ("fprop", "dgrad", "wgrad"):
        made[name] = Gemm(**_fields(found[name]))
    for name in ("dgrad_operands", "wgrad_operands"):
        if (operands := found.get(name)) is not None:
            slots = operands["slots"] and _read(operands["slots"])
            made[name] = Operands(slots, operands["dequantized"])  # type: ignore[arg-type]
    return Slots(**made)


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    """Returns fields with the tuples that JSON has lists for."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


@constant
class Recipe(Constant):
    """Base of the recipes. An instance is a constant of the graph: equal recipes never recompile.

    `backward` is the precision of the backward's GEMMs where it is not the recipe's own: ``"high_precision"``,
    ``"dequantized"``, another recipe or its name, or a `BackwardPrecision`, or a mapping, that says it of each GEMM."""

    name: ClassVar[str] = ""
    of_stored_weights: ClassVar[bool] = False  # for weights that `quantize_` has stored, and no others

    backward: BackwardPrecision | Any | None = dataclasses.field(
        default=None, kw_only=True
    )  # a `BackwardPrecision`, whatever it was given as

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "backward", resolve_backward(self.backward, f"{type(self).__name__}.backward"))
        if getattr(self, "fp8_format", None) is Format.E2M1:
            raise RecipeError(
                f"{type(self).__name__}.fp8_format is Format.E2M1, expected Format.E4M3 or Format.HYBRID; FP4 is"
                " NVFP4BlockScaling()"
            )

    def slots(self) -> Slots:
        raise RecipeError(f"{type(self).__name__} is the base of recipes, expected one of its subclasses")

    def slots_at(self, module: str) -> Slots:
        """The recipe's own slots of the layer at this module path: the same for all, unless a recipe says otherwise."""
        return self.slots()

    def slots_of(self, module: str) -> Slots:
        """The slots of the layer at this module path, with the backward that it has."""
        slots = self.slots_at(module)
        return slots if self.backward is None else self.backward.applied(slots, module)

    @property
    def own(self) -> "Recipe":
        """The recipe with the backward of its own."""
        return self if self.backward is None else replace(self, backward=None)

    def with_backward(self, default: BackwardPrecision | None) -> "Recipe":
        """The recipe with a backward, unless it says itself which it has."""
        return self if default is None or self.backward is not None else replace(self, backward=default)


def refuse(recipe: Recipe, **reasons: str) -> None:
    """Fields of TransformerEngine's that have no effect here, each with the reason: only their default is accepted."""
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in reasons and value != field.default:
            name = f"{type(recipe).__name__}.{field.name}"
            raise RecipeError(f"{name} is {value!r}, expected {field.default!r}: {reasons[field.name]}")


@constant
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, computed from the tensor itself. Name, fields and defaults are TransformerEngine's.

    `use_split_accumulator` acts on CUDA's tensor cores; the CPU always accumulates in fp32.
    """

    name: ClassVar[str] = "current"

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    def slots(self) -> Slots:
        forward, backward = self.fp8_format.forward, self.fp8_format.backward
        return Slots.of(
            self.fp8_quant_fwd_inp.quantizer(forward),
            self.fp8_quant_fwd_weight.quantizer(forward),
            self.fp8_quant_bwd_grad.quantizer(backward),
            *(self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad),
        )


@constant
class Float8RowwiseScaling(Recipe):
    """FP8 with one scale a row of each GEMM operand, computed from the row itself: torchao's "rowwise".

    A row is what one row or column of the GEMM's output depends on, so an outlier costs precision there alone.
    `power_2_scale` is torchao's `round_scales_to_power_of_2`, its default too; `use_split_accumulator` is as in
    Float8CurrentScaling. Source: torchao, float8/config.py, Float8LinearRecipeName.ROWWISE.
    """

    name: ClassVar[str] = "rowwise"

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True  # round every encode scale down to a power of two
    amax_epsilon: float = 0.0  # lower bound on every amax
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    def slots(self) -> Slots:
        forward, backward = (
            Quantizer(element.name, float(self.amax_epsilon), self.power_2_scale, scope="row")
            for element in (self.fp8_format.forward, self.fp8_format.backward)
        )
        gemms = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        return Slots.of(forward, forward, backward, *gemms)


@constant
class Float8BlockScaling(Recipe):
    """FP8 with one scale a block of 128 elements along the contraction (dimension 1) or of 128 x 128 (dimension 2).

    Name, fields and defaults are TransformerEngine's, and so is what is refused: no GEMM library multiplies two
    operands with 128 x 128 blocks, and scales that change along the contraction need the promotion to fp32 between
    blocks."""

    name: ClassVar[str] = "block"

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    _SCOPES: ClassVar[dict[int, str]] = {1: "1x128", 2: "128x128"}

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = {
            f"{tensor}_block_scaling_dim": getattr(self, f"{tensor}_block_scaling_dim") for tensor in ("x", "w", "grad")
        }
        for name, dim in dims.items():
            if isinstance(dim, bool) or dim not in self._SCOPES:
                raise RecipeError(f"Float8BlockScaling.{name} is {dim}, expected 1 (1 x 128) or 2 (128 x 128)")
        square = [name for name, dim in dims.items() if dim == 2]
        if len(square) > 1:
            raise RecipeError(
                f"Float8BlockScaling: {' and '.join(square)} are 2, expected at most one of them, as no library"
                f" multiplies two operands with 128 x 128 blocks; set {square[0]}=1"
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise RecipeError(
                    f"Float8BlockScaling.{name} has use_split_accumulator=False, expected True: block scales are"
                    " applied where partial sums are promoted to fp32; leave the field out"
                )

    def slots(self) -> Slots:
        forward, backward = self.fp8_format.forward, self.fp8_format.backward
        x, w, grad = (
            self._SCOPES[dim]
            for dim in (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        )
        return Slots.of(
            self.fp8_quant_fwd_inp.quantizer(forward, x),
            self.fp8_quant_fwd_weight.quantizer(forward, w),
            self.fp8_quant_bwd_grad.quantizer(backward, grad),
            *(self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad),
        )
