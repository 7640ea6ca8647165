"""Formats of published low-precision checkpoints, as data: which tensors stand for a weight, and what they are stored as.

A weight ``name`` of the model is one or several tensors of a checkpoint: ``name`` with a suffix each. Which format it
is in is found by these keys, their dtypes and their shapes; two layers of one checkpoint may have different formats.
A checkpoint's configuration, where there is one, is only asked for what its keys cannot show. What is read is also how
it is written: a record has both ways, and a method of `METHODS` the configuration that other processes find it by.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from te_inductor.api.checkpoint_formats import compressed_tensors, fine_grained, modelopt
from te_inductor.api.checkpoint_formats.protocol import BLOCKS, NVFP4, ROWS, TENSOR, CheckpointFormat, QuantMethod

OWN = "te_inductor"  # the method of folders of older versions, and the entry of a configuration that has our recipes

# In the order in which one is chosen to be written.
METHODS = (fine_grained.METHOD, compressed_tensors.METHOD, modelopt.METHOD, QuantMethod(OWN, ()))
FORMATS = tuple(one for program in METHODS for one in program.formats)
RECIPES = (TENSOR, ROWS, BLOCKS, NVFP4)

# Ends of keys that hold what activations or a cache of keys and values were calibrated to. Recipes of stored weights
# scale activations by themselves, or leave them as they are.
CALIBRATED = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)

# Ends of keys of formats that are no others' companions, and why a weight with them is not what it would be taken for.
FOREIGN = {
    "pre_quant_scale": "activations would have to be multiplied by it (AWQ, SVDQuant)",
    "svdquant_lora_a": "it is one of two factors of a low-rank part (SVDQuant)",
    "svdquant_lora_b": "it is one of two factors of a low-rank part (SVDQuant)",
    "weight_zero_point": "weights that are not symmetric cannot be stored",
    "weight_g_idx": "groups in another order cannot be stored",
    "weight_shape": "integer weights (pack-quantized) cannot be stored",
    "qweight": "integer weights (GPTQ, AWQ) cannot be stored",
}


def unsupported(configuration: Mapping[str, Any]) -> list[str]:
    """What a checkpoint's quantization_config asks for and is not had here."""
    method = configuration.get("quant_method")
    if method is None:
        return []
    found = _program(configuration)
    if found is None:
        known = ", ".join(program.name for program in METHODS)
        return [f"quantization_config.quant_method: found {method!r}, expected one of {known}"]
    return found.unsupported(configuration)


def told_apart(fitting: Sequence[CheckpointFormat], configuration: Mapping[str, Any], path: str) -> CheckpointFormat:
    """The one of several formats with the keys of a layer that the configuration says; the first, if it says none. Several
    fit where a scale a block is one a tensor, too."""
    program = _program(configuration)
    said = program.said(configuration, path) if program and program.said else None
    return next((one for one in fitting if one is said), fitting[0])


def _program(configuration: Mapping[str, Any]) -> QuantMethod | None:
    return next((program for program in METHODS if program.name == configuration.get("quant_method")), None)
