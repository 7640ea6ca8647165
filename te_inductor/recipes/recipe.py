"""The recipe classes: what a user chooses, and the quantizers and GEMMs that each choice means for a linear layer."""

from dataclasses import fields
from typing import ClassVar

from te_inductor.errors import RecipeError, wrong_type
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import Format
from te_inductor.recipes.quantizers import Gemm, MMParams, QParams, Quantizer, check_epsilon


@constant
class Slots(Constant):
    """Everything that the three GEMMs of one linear layer need: y = x wᵀ, dx = dy w, dw = dyᵀ x."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm


@constant
class Recipe(Constant):
    """Base of the recipes. An instance is a constant of the graph: equal recipes never recompile."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value, expected = (
                f"{type(self).__name__}.{field.name}",
                getattr(self, field.name),
                type(field.default),
            )
            if expected is float:
                check_epsilon(name, value)
            elif not isinstance(value, expected):
                raise RecipeError(wrong_type(name, value, f"a {expected.__name__}"))

    def slots(self) -> Slots:
        raise RecipeError(f"{type(self).__name__} is the base of recipes, expected one of its subclasses")


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
        return Slots(
            input=self.fp8_quant_fwd_inp.quantizer(forward),
            weight=self.fp8_quant_fwd_weight.quantizer(forward),
            grad_output=self.fp8_quant_bwd_grad.quantizer(backward),
            fprop=self.fp8_gemm_fprop.gemm("fprop"),
            dgrad=self.fp8_gemm_dgrad.gemm("dgrad"),
            wgrad=self.fp8_gemm_wgrad.gemm("wgrad"),
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
        return Slots(
            input=forward,
            weight=forward,
            grad_output=backward,
            fprop=self.fp8_gemm_fprop.gemm("fprop"),
            dgrad=self.fp8_gemm_dgrad.gemm("dgrad"),
            wgrad=self.fp8_gemm_wgrad.gemm("wgrad"),
        )
