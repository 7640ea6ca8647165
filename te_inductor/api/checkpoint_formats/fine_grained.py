"""transformers' fine-grained FP8, as DeepSeek and Qwen publish it: `quant_method` "fp8".

Sources, for the configuration: transformers 5.23, utils/quantization_config.py (FineGrainedFP8Config) and
quantizers/quantizers_utils.py (should_convert_module); vLLM, model_executor/layers/quantization/fp8.py (Fp8Config)."""

import re
from typing import Any

from te_inductor.api.checkpoint_formats.protocol import BLOCKS, TENSOR, Contents, QuantMethod, blocks, fp8, scalar
from te_inductor.recipes.formats import BLOCK_128X128

_BLOCKS = fp8("fine-grained FP8 (transformers)", "_scale_inv", blocks, BLOCKS)
_TENSOR = fp8("FP8 with a scale a tensor (transformers)", "_scale_inv", scalar, TENSOR)
_WRITTEN = QuantMethod("fp8", (_BLOCKS,))


def _configuration(contents: Contents) -> dict[str, Any] | str:
    for path, (recipe, n, k) in contents.stored.items():
        found = _WRITTEN.format_of(recipe, n, k)
        if isinstance(found, str):
            return contents.misfit(path, found)
        if any(size > side and size % side for size, side in zip((n, k), BLOCK_128X128.block, strict=True)):
            # transformers divides the weight by the number of blocks where it has no kernel.
            return contents.misfit(path, "sizes that are multiples of 128, where a weight has several blocks")
    names = list(dict.fromkeys(name for path in contents.plain for name in (path, contents.tail(path))))
    for path in contents.stored:
        for name in names:
            if _skips(name, path) or _skips(name, contents.tail(path)):
                return contents.misfit(path, f"a name that it does not take for that of {name}, in high precision")
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK_128X128.block),
        "modules_to_not_convert": names,
    }


def _skips(name: str, path: str) -> bool:
    """Whether transformers takes the name of a layer in high precision for one of this layer's, too: as a pattern from
    the start up to a dot, or as the end."""
    return path.endswith(name) or re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", path) is not None


METHOD = QuantMethod(
    "fp8",
    (_BLOCKS, _TENSOR),
    {"weight_block_size": (None, list(BLOCK_128X128.block)), "fmt": (None, "e4m3")},
    _configuration,
)
