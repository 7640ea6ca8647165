"""ModelOpt: FP8 with keys as compressed-tensors', and NVFP4. Its checkpoints are read; transformers has no loader of
them, so none is written."""

from te_inductor.api.checkpoint_formats import nvfp4
from te_inductor.api.checkpoint_formats.protocol import QuantMethod

_ALGORITHMS = (
    *(None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "fp8_pb_wo", "fp8_pb_real"),
    *("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION"),
)

METHOD = QuantMethod("modelopt", (nvfp4.DECODED,), {"quant_algo": _ALGORITHMS})
