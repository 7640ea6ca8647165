"""The recipes of microscaled formats: MXFP8 and NVFP4, which Blackwell's tensor cores multiply, and MXFP4. Elsewhere
they are emulated, value for value."""

from typing import Any, ClassVar

from te_inductor.errors import RecipeError
from te_inductor.recipes.constants import constant
from te_inductor.recipes.formats import E2M1, E4M3, ROW, TENSOR, Format
from te_inductor.recipes.quantizers import METRICS, Quantizer
from te_inductor.recipes.recipe import ATTENTION, Recipe, Slots, refuse

_TENSORS = ("none", "weights", "activations", "all")  # which of the forward's tensors a field is about
_BACKWARD = "the field is named backward here, and every recipe has it"


@constant
class MXFP8BlockScaling(Recipe):
    """MXFP8: one scale, a power of two, for 32 elements along the contraction. Emulated where no tensor core applies
    them.

    Names, fields and defaults are TransformerEngine's, which ignores `margin`; here it is refused, and so is attention in
    FP8. Its `backward_override` is `backward` here. `enable_2d_quantization` gives weights one scale for 32 x 32, so that
    both of their copies hold the same values."""

    name: ClassVar[str] = "mxfp8"

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            self,
            margin="the scale is the smallest power of two that holds the amax",
            fp8_dpa=ATTENTION,
            fp8_mha=ATTENTION,
            backward_override=_BACKWARD,
        )

    def slots(self) -> Slots:
        forward, backward = self.fp8_format.forward.name, self.fp8_format.backward.name
        x, w = "1x32", "32x32" if self.enable_2d_quantization else "1x32"
        return Slots.of(Quantizer(forward, scope=x), Quantizer(forward, scope=w), Quantizer(backward, scope=x))


@constant
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit elements, an E4M3 scale for 16 of them along the contraction, an fp32 factor for the tensor.
    Emulated where no tensor core applies them.

    Three measures make training with it possible. Weights have one scale for 16 x 16, so that both of their copies hold
    the same values. Operands of wgrad go through a random Hadamard transform along the contraction, which spreads
    outliers over 16 values and cancels in the product. Gradients are rounded stochastically, so that their mean is
    right; the bits follow from torch's seed. Each can be turned off.

    With `row_scaled_activation` an activation has an fp32 factor a row of each copy; it takes `disable_rht`. With
    `nvfp4_4over6` a block's amax goes to 6 or to 4, whichever leaves the smaller error by `nvfp4_4over6_err_mode`.
    With `nvfp4_4over6_e4m3_use_256` the largest scale is 256, which leaves room for those of blocks that go to 4. It
    takes `disable_rht` for activations, as in TransformerEngine.

    Names, fields and defaults are TransformerEngine's, whose environment variables are not read, and whose
    `backward_override` is `backward` here. Other formats and attention are refused."""

    name: ClassVar[str] = "nvfp4"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            self,
            fp4_format="NVFP4 is E2M1",
            fp8_format="NVFP4's scales of blocks are E4M3",
            fp8_dpa=ATTENTION,
            fp8_mha=ATTENTION,
            backward_override=_BACKWARD,
        )
        self._check_four_over_six()
        if self.row_scaled_activation and not self.disable_rht:
            raise RecipeError(
                "NVFP4BlockScaling.row_scaled_activation is True, expected False beside the random Hadamard transform,"
                " which TransformerEngine does not combine with it either; pass disable_rht=True"
            )

    def _check_four_over_six(self) -> None:
        known = {"nvfp4_4over6": _TENSORS, "nvfp4_4over6_e4m3_use_256": _TENSORS, "nvfp4_4over6_err_mode": METRICS}
        for field, values in known.items():
            if (value := getattr(self, field)) not in values:
                raise RecipeError(f"NVFP4BlockScaling.{field} is {value!r}, expected one of {', '.join(values)}")
        if self.nvfp4_4over6 == "none":
            alone = "it acts beside nvfp4_4over6 alone"
            refuse(self, nvfp4_4over6_e4m3_use_256=alone, nvfp4_4over6_err_mode=alone)
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise RecipeError(
                f"NVFP4BlockScaling.nvfp4_4over6 is {self.nvfp4_4over6!r}, expected 'none' or 'weights' beside the random"
                " Hadamard transform of activations, which TransformerEngine does not combine with it either; pass"
                " disable_rht=True"
            )

    def _four_over_six(self, tensor: str) -> dict[str, Any]:
        """Fields of this tensor's quantizer."""
        if self.nvfp4_4over6 not in (tensor, "all"):
            return {}
        largest = 256.0 if self.nvfp4_4over6_e4m3_use_256 in (tensor, "all") else E4M3.max
        return {"candidates": (E2M1.max, 4.0), "error_metric": self.nvfp4_4over6_err_mode, "scale_max": largest}

    def slots(self) -> Slots:
        element, x, rht = self.fp4_format.forward.name, "1x16", not self.disable_rht
        w = "1x16" if self.disable_2d_quantization else "16x16"
        return Slots.of(
            Quantizer(
                element,
                scope=x,
                hadamard=rht,
                factor_scope=ROW.name if self.row_scaled_activation else TENSOR.name,
                **self._four_over_six("activations"),
            ),
            Quantizer(element, scope=w, **self._four_over_six("weights")),
            Quantizer(element, scope=x, hadamard=rht, stochastic=not self.disable_stochastic_rounding),
        )


@constant
class MXFP4BlockScaling(Recipe):
    """MXFP4: 4-bit elements, and for 32 of them along the contraction one scale, a power of two. Emulated on every
    device but for experts on Blackwell: torch has no other GEMM whose tensor cores apply such scales.

    The three measures of NVFP4 make training with it possible too, and each can be turned off: weights have one scale
    for 32 x 32, operands of wgrad go through a random Hadamard transform, gradients are rounded stochastically. The
    scale is MXFP8's, the smallest power of two with which the amax does not saturate. TransformerEngine has no such
    recipe; fields are named as NVFP4BlockScaling's.

    Source of the format: OCP Microscaling Formats Specification, revision 1.0.
    """

    name: ClassVar[str] = "mxfp4"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, fp4_format="MXFP4 is E2M1")

    def slots(self) -> Slots:
        element, x, rht = self.fp4_format.forward.name, "1x32", not self.disable_rht
        w = "1x32" if self.disable_2d_quantization else "32x32"
        return Slots.of(
            Quantizer(element, scope=x, hadamard=rht),
            Quantizer(element, scope=w),
            Quantizer(element, scope=x, hadamard=rht, stochastic=not self.disable_stochastic_rounding),
        )
