"""The kernels of stored weights as ops: `nvfp4_partial_sums` and `nvfp4_fp8_partial_sums`, which lowerings emit, and the
ops of dense weights and of experts' on CUDA tensors, which are plain torch where the device does not run a kernel."""

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels import nvfp4_fp8 as prompt_policy
from te_inductor.kernels import nvfp4_linear as policy
from te_inductor.kernels.experts_decode import runs, scales_as
from te_inductor.kernels.problem import Sizes
from te_inductor.numerics import nvfp4
from te_inductor.recipes import Quantizer
from te_inductor.runtime.definition import implement_on_cuda, op_of
from te_inductor.runtime.eager import dense, experts
from te_inductor.templates.triton import experts_decode, nvfp4_expand, nvfp4_fp8, nvfp4_linear, nvfp4_store
from te_inductor.templates.triton.partial_sums import add_up, sum_dtype


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
    assembly = policy.runs(target)  # which has the instructions that those kernels want
    return experts_decode.fp8_product(x, ends, ids, values, scale_inv, quantizer, out_dtype, assembly)


def _experts_dequantize(
    stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, k: int, dtype: torch.dtype
) -> Tensor:
    run = nvfp4_expand.dequantize if _runs_on(stored.device) else experts.nvfp4_dequantize
    return run(stored, block_scale, tensor_scale, k, dtype)


partial_sums = op_of(
    nvfp4_linear.partial_sums,
    lambda x, stored, block_scale, tensor_scale, config, out_dtype, assembly=True: nvfp4_linear.empty(
        x, stored.shape[0], config, out_dtype
    ),
    name="nvfp4_partial_sums",
)
fp8_partial_sums = op_of(
    nvfp4_fp8.partial_sums,
    lambda x, x_scale, stored, block_scale, tensor_scale, config, out_dtype: x.new_empty(
        (config.splits, x.shape[0], stored.shape[0]), dtype=sum_dtype(config.splits, out_dtype)
    ),
    name="nvfp4_fp8_partial_sums",
)


def _linear_fp8(
    x: Tensor, x_scale: Tensor, stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    weight, target = (stored, block_scale, tensor_scale), targets.of(x.device)
    if not prompt_policy.runs(target):
        return nvfp4.linear_fp8(x, x_scale, *weight, out_dtype)
    if x.shape[0] > prompt_policy.PROMPT_ROWS:
        return dense.scaled_mm(x, x_scale, *_recast(*weight), None, policy.PREFILL, out_dtype)
    config = prompt_policy.configured(x.shape[0], stored.shape[0], x.shape[1], target.limits)
    parts = nvfp4_fp8.partial_sums(nvfp4_fp8.arranged(x), x_scale.contiguous(), *weight, config, out_dtype)
    return add_up(parts, out_dtype)


def _linear(x: Tensor, stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    sizes = Sizes(x.shape[0], stored.shape[0], x.shape[1])
    config = policy.configured(policy.problem(targets.of(x.device), sizes, x.dtype, out_dtype))
    if config is None:
        return nvfp4.linear(x, stored, block_scale, tensor_scale, out_dtype)
    x = nvfp4_linear.arranged(x.contiguous(), config)
    parts = nvfp4_linear.partial_sums(x, stored, block_scale, tensor_scale, config, out_dtype)
    return add_up(parts, out_dtype)


def _dequantize(stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    run = nvfp4_expand if _runs_on(stored.device) else nvfp4
    return run.dequantize(stored, block_scale, tensor_scale, k, dtype)


def _recast(stored: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    run = nvfp4_expand if _runs_on(stored.device) else nvfp4
    return run.recast(stored, block_scale, tensor_scale)


def _store(weight: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if weight.numel() and weight.dtype in (torch.bfloat16, torch.float16, torch.float32) and _runs_on(weight.device):
        return nvfp4_store.store(weight, amax)
    return nvfp4.stored(weight, amax)


def _runs_on(device: torch.device) -> bool:
    return policy.runs(targets.of(device))


implement_on_cuda(
    nvfp4_linear=_linear,
    nvfp4_linear_fp8=_linear_fp8,
    nvfp4_dequantize=_dequantize,
    nvfp4_recast=_recast,
    nvfp4_store=_store,
    nvfp4_experts=_nvfp4_product,
    fp8_experts=_fp8_product,
    nvfp4_experts_dequantize=_experts_dequantize,
)
