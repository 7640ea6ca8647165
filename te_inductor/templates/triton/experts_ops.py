"""Products with experts' stored weights on CUDA: the Triton kernels where the device runs them, else plain torch."""

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels import nvfp4_linear
from te_inductor.kernels.experts_decode import runs, scales_as
from te_inductor.recipes import Quantizer
from te_inductor.runtime.definition import implement_on_cuda
from te_inductor.runtime.eager import experts
from te_inductor.templates.triton import experts_decode, nvfp4_expand


def _nvfp4_product(
    x: Tensor,
    ends: Tensor | None,
    ids: Tensor | None,
    stored: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    if not runs(targets.of(x.device), True, x.dtype):
        return experts.nvfp4_product(x, ends, ids, stored, block_scale, tensor_scale, out_dtype)
    return experts_decode.nvfp4_product(x, ends, ids, stored, block_scale, tensor_scale, out_dtype)


def _fp8_product(
    x: Tensor,
    ends: Tensor | None,
    ids: Tensor | None,
    values: Tensor,
    scale_inv: Tensor,
    quantizer: Quantizer,
    out_dtype: torch.dtype,
) -> Tensor:
    target = targets.of(x.device)
    if not runs(target, False, x.dtype) or not scales_as(quantizer.format, quantizer.granularity):
        return experts.fp8_product(x, ends, ids, values, scale_inv, quantizer, out_dtype)
    assembly = nvfp4_linear.runs(target)  # which has the instructions that those kernels want
    return experts_decode.fp8_product(x, ends, ids, values, scale_inv, quantizer, out_dtype, assembly)


def _dequantize(stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    run = nvfp4_expand.dequantize if nvfp4_linear.runs(targets.of(stored.device)) else experts.nvfp4_dequantize
    return run(stored, block_scale, tensor_scale, k, dtype)


implement_on_cuda(nvfp4_experts=_nvfp4_product, fp8_experts=_fp8_product, nvfp4_experts_dequantize=_dequantize)
