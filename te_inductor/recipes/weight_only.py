"""NVFP4WeightOnly: weights of 4.5 bits and activations as they are; and which weights share a scale."""

from typing import ClassVar

from te_inductor.errors import RecipeError, unknown
from te_inductor.recipes.constants import constant
from te_inductor.recipes.recipe import Recipe, Slots

PREFILLS = ("fp8", "exact")
# Layers of one module that engines multiply as one matrix, which has one scale of the tensor. Source: vLLM,
# packed_modules_mapping of its models.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


@constant
class NVFP4WeightOnly(Recipe):
    """Weights stored in NVFP4, multiplied with activations of the model's own dtype.

    `te_inductor.quantize_` stores the weights, for inference. A weight that learns is stored by each forward, and its
    gradient goes straight through the cast, so that `quantize_` changes no number afterwards: quantization-aware training.
    A layer whose weight is neither stays in high precision.

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


def fused(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The module and the layers with which a layer's weight, by its name, is multiplied as one matrix."""
    module, _, layer = name.removesuffix(".weight").rpartition(".")
    return next(((module, layers) for layers in FUSED if layer in layers), None)
