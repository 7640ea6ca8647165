"""NVFP4WeightOnly: inference with weights of 4.5 bits and activations as they are."""

from typing import ClassVar

from te_inductor.errors import RecipeError, unknown
from te_inductor.recipes.constants import constant
from te_inductor.recipes.recipe import Recipe, Slots

PREFILLS = ("fp8", "exact")


@constant
class NVFP4WeightOnly(Recipe):
    """Weights stored in NVFP4, multiplied with activations of the model's own dtype; for inference.

    `te_inductor.quantize_` stores the weights; a layer whose weight is not stored so stays in high precision.

    `prefill` says what large batches do on a GPU with FP8 GEMMs: "fp8" casts the stored weight once more, to E4M3 with
    one scale a row, and the activations likewise, which is faster than bf16 and adds FP8's noise to NVFP4's; "exact"
    multiplies the stored values in the activations' dtype."""

    name: ClassVar[str] = "nvfp4_weight_only"
    of_stored_weights: ClassVar[bool] = True

    prefill: str = "fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill not in PREFILLS:
            raise RecipeError(unknown("NVFP4WeightOnly.prefill", self.prefill, PREFILLS))

    def slots(self) -> Slots:
        raise RecipeError(
            "NVFP4WeightOnly has no quantizers for a layer's tensors, expected a use through te_inductor.quantize_"
        )
