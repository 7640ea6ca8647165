"""Layers whose weight is stored in low precision, for inference: `quantization.quantize_` stores it.

The weight is a constant to autograd. A gradient flows to x, as an adapter (LoRA) in an earlier layer wants it:
``dx = dy @ dequantize(w)``. Through FP8 values with one scale, or scales of rows, it is an FP8 GEMM.

Layers train with a weight which `quantize_` is going to store: quantization-aware training. Each forward stores the
weight, which stays a parameter in high precision, and multiplies by what is stored, by the kernels that multiply stored
weights. The gradient passes the cast straight through: ``dx = dy @ dequantize(w)``, as through a stored weight, and
``dw = dyᵀ x``. So what `quantize_` stores afterwards are the bits that the last forward multiplied.

# Note [dgrad through stored values]
The stored copy has K contiguous, as fprop reads it. dgrad contracts over N, so it reads the transpose of the same bytes,
which the backward writes: 2 bytes an element moved, where values written out in bf16 are 3, and then a GEMM at half the
rate. One scale of the tensor holds for the transpose too. Scales of rows, s, lie along N, so they are multiplied to dy
before that is cast: ``dx[m, k] = sum_n (dy[m, n] * s[n]) * q[n, k]``. The weight is rounded no second time either way.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels import cublaslt, fp8_small_m, nvfp4_fp8
from te_inductor.kernels import nvfp4_linear as policy
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import Problem, Sizes
from te_inductor.kernels.select import select
from te_inductor.numerics import nvfp4
from te_inductor.ops.casts import dequantize, quantize, tensor_amax, transpose
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gemm import scaled_mm
from te_inductor.ops.written_out import for_program, is_called, leaves
from te_inductor.recipes import Quantizer, Slots
from te_inductor.runtime.definition import op_of
from te_inductor.targets import Target

# The FP8 GEMM of large batches: scales of rows, powers of two, so that a stored value is rounded once and rarely.
_ROWWISE = Quantizer("e4m3", power_2_scale=True, scope="row")


def _product_like(x: Tensor, *rest: Any) -> Tensor:
    *_, stored, _, _, out_dtype = rest
    return x.new_empty((x.shape[0], stored.shape[0]), dtype=out_dtype)


def _recast_like(stored: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, half = stored.shape
    return stored.new_empty((rows, 2 * half), dtype=_ROWWISE.format.dtype), tensor_scale.new_empty((rows, 1))


nvfp4_linear = op_of(nvfp4.linear, _product_like, name="nvfp4_linear")
nvfp4_linear_fp8 = op_of(nvfp4.linear_fp8, _product_like, name="nvfp4_linear_fp8")
nvfp4_dequantize = op_of(
    nvfp4.dequantize,
    lambda stored, block_scale, tensor_scale, k, dtype: stored.new_empty((stored.shape[0], k), dtype=dtype),
    name="nvfp4_dequantize",
)
nvfp4_recast = op_of(nvfp4.recast, _recast_like, name="nvfp4_recast")
is_called(nvfp4_linear, nvfp4_linear_fp8, nvfp4_dequantize, nvfp4_recast)


class _Frozen(torch.autograd.Function):
    """``kind.product(x, *weight, *constants)``, and its gradient for x alone; also within transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kind: Any, constants: tuple[Any, ...], *weight: Tensor) -> Tensor:  # type: ignore[override]
        return kind.product(x, *weight, *constants)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kind, ctx.constants, *weight = inputs
        ctx.save_for_backward(*weight)
        ctx.k, ctx.dtype = x.shape[-1], x.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: each access unpacks them
        dx = ctx.kind.gradient(dy, *saved, ctx.k, *ctx.constants)
        return dx.to(ctx.dtype), None, None, *(None for _ in saved)


def _fixed(weight: Tensor) -> None:
    """A weight's sizes are constants of the graph, also under ``dynamic=True``: asking for an int makes them so."""
    for size in weight.shape:
        int(size)


@functools.lru_cache(4096)  # of layers in eager code, which ask at each call
def _chosen(target: Target, sizes: Sizes, rows: torch.dtype, out: torch.dtype, casts: bool, gone: bool) -> KernelFamily:
    return select(policy.problem(target, sizes, rows, out, casts, gone)).family


class NVFP4Product:
    """How an NVFP4 weight (stored, block_scale, tensor_scale) is multiplied."""

    @staticmethod
    def product(
        x: Tensor, stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, prefill: str, out_dtype: torch.dtype
    ) -> Tensor:
        weight, m = (stored, block_scale, tensor_scale), x.shape[0]
        _fixed(stored)
        n, k = int(stored.shape[0]), int(x.shape[1])  # torch 2.11 has a symbol for K, which no cache takes
        sizes, casts, gone = Sizes(m, n, k), prefill == "fp8", leaves(nvfp4_weight_only)
        chosen = _chosen if isinstance(m, int) and not gone else _chosen.__wrapped__
        family = chosen(targets.of(x.device), sizes, x.dtype, out_dtype, casts, gone)
        if family is cublaslt.WRITTEN_OUT:
            return F.linear(x, nvfp4_dequantize(*weight, x.shape[1], x.dtype)).to(out_dtype)
        if family not in (nvfp4_fp8.FAMILY, cublaslt.RECAST):
            return nvfp4_linear(x, *weight, out_dtype)  # type: ignore[no-any-return]
        data, scale_inv = quantize(x, _ROWWISE)
        if family is nvfp4_fp8.FAMILY:
            return nvfp4_linear_fp8(data, scale_inv, *weight, out_dtype)  # type: ignore[no-any-return]
        return scaled_mm(data, scale_inv, *nvfp4_recast(*weight), None, policy.PREFILL, out_dtype)  # type: ignore[no-any-return]

    @staticmethod
    def gradient(dy: Tensor, stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, k: int, *_: Any) -> Tensor:
        return dy @ nvfp4_dequantize(stored, block_scale, tensor_scale, k, dy.dtype)


class _FP8:
    """How an FP8 weight (data, scale_inv) is multiplied: the activations are cast on the way."""

    @staticmethod
    def product(x: Tensor, data: Tensor, scale_inv: Tensor, slots: Slots, out_dtype: torch.dtype) -> Tensor:
        m, least = x.shape[0], fp8_small_m.ROWS[0]
        if isinstance(m, torch.SymInt) and not leaves(fp8_weight):
            sizes = Sizes(None, *data.shape, at_most=least)
            few = Problem(targets.of(x.device), sizes, slots.fprop, out_dtype)
            if select(few).family is fp8_small_m.FAMILY:
                bool(m <= least)  # asked, so that there is a graph for few rows, and another for more
        return scaled_mm(*quantize(x, slots.input), data, scale_inv, None, slots.fprop, out_dtype)  # type: ignore[no-any-return]

    @staticmethod
    def gradient(dy: Tensor, data: Tensor, scale_inv: Tensor, k: int, slots: Slots, *_: Any) -> Tensor:
        """Note [dgrad through stored values]. Transforms of torch.func may want a gradient of it, which the cast has only
        for autograd."""
        scope = slots.weight.granularity
        if scope.blocked or torch._C._are_functorch_transforms_active():
            return dy @ dequantize(data, scale_inv, slots.weight, dy.dtype)[:, :k]
        dtype = dy.dtype
        if not scope.whole:
            dy, scale_inv = dy * scale_inv.t(), scale_inv.new_ones((k, 1))
        g = quantize(dy, slots.grad_output)
        return scaled_mm(*g, transpose(data, k), scale_inv, None, slots.dgrad, dtype)  # type: ignore[no-any-return]


def _linear(
    kind: Any, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, constants: tuple[Any, ...]
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and x.requires_grad:
        y = _Frozen.apply(flat, kind, constants, *weight)
    else:
        y = kind.product(flat, *weight, *constants)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def _nvfp4_weight_only(
    x: Tensor,  # (..., K)
    stored: Tensor,  # (N, K/2)
    block_scale: Tensor,  # (N, K/16)
    tensor_scale: Tensor,  # ()
    bias: Tensor | None,  # (N,)
    prefill: str,
    out_dtype: torch.dtype,
) -> Tensor:  # (..., N)
    with for_program(nvfp4_weight_only):
        return _linear(NVFP4Product, x, (stored, block_scale, tensor_scale), bias, (prefill, out_dtype))


def _fp8_weight(
    x: Tensor,  # (..., K)
    data: Tensor,  # (N, K padded)
    scale_inv: Tensor,  # as slots.weight stores it
    bias: Tensor | None,  # (N,)
    slots: str,  # as Slots.to_text writes them
    out_dtype: torch.dtype,
) -> Tensor:  # (..., N)
    with for_program(fp8_weight):
        return _linear(_FP8, x, (data, scale_inv), bias, (Slots.from_text(slots), out_dtype))


nvfp4_weight_only = op_of(_nvfp4_weight_only, name="nvfp4_weight_only")
fp8_weight = op_of(_fp8_weight, name="fp8_weight")


def product_of(op: Any) -> Any:
    """Returns one of these two ops, or the function that it calls where transforms of torch.func are active: a custom op is
    out of their reach while it is called."""
    functions = {nvfp4_weight_only: _nvfp4_weight_only, fp8_weight: _fp8_weight}
    return functions[op] if torch._C._are_functorch_transforms_active() else op


def _stored_like(weight: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    n, blocks = weight.shape[0], -(-weight.shape[1] // nvfp4.BLOCK)
    return (
        weight.new_empty((n, blocks * nvfp4.BLOCK // 2), dtype=torch.uint8),
        weight.new_empty((n, blocks), dtype=torch.float8_e4m3fn),
        weight.new_empty((), dtype=torch.float32),
    )


nvfp4_store = op_of(nvfp4.stored, _stored_like, name="nvfp4_store")
is_called(nvfp4_store)


@dataclass(frozen=True)
class TrainedNVFP4(Operation):
    """Inputs: x (M, K), a weight (N, K), the amax that its scale follows from, or None. Saved for backward: x, and what is
    stored of the weight."""

    prefill: str
    out_dtype: torch.dtype

    def compute(self, needs: Needs, x: Tensor, weight: Tensor, amax: Tensor | None) -> tuple[Tensor, Any]:
        stored, block_scale, tensor_scale = nvfp4_store(weight, amax)
        y = NVFP4Product.product(x, stored, block_scale, tensor_scale, self.prefill, self.out_dtype)
        return y, (stored, block_scale, tensor_scale, needs)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, weight, _ = inputs
        *stored, needs = found
        ctx.save_for_backward(x if needs[1] else None, *(stored if needs[0] else ()))
        ctx.needs, ctx.width, ctx.dtypes = needs, x.shape[1], (x.dtype, weight.dtype)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [dy], (x, *stored), (x_dtype, dtype) = grads, ctx.saved_tensors, ctx.dtypes
        dx = NVFP4Product.gradient(dy, *stored, ctx.width).to(x_dtype) if ctx.needs[0] else None
        return dx, torch.mm(dy.t(), x.to(dy.dtype)).to(dtype) if ctx.needs[1] else None, None


def trace_nvfp4_trained(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K), a parameter in high precision
    bias: Tensor | None,  # (N,)
    prefill: str,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,  # () fp32, of `nvfp4_shared_amax`
) -> Tensor:  # (..., N)
    """What `nvfp4_weight_only` computes of the weight as it is stored, with a gradient for the weight too."""
    y = TrainedNVFP4(prefill, out_dtype)(x.reshape(-1, x.shape[-1]), weight, amax)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def trace_nvfp4_shared_amax(weights: Sequence[Tensor]) -> Tensor:  # () fp32
    """The largest amax of weights that have one scale, as `quantize_` gives those that engines multiply as one matrix."""
    return torch.stack([tensor_amax(weight.detach()) for weight in weights]).amax()


nvfp4_shared_amax = op_of(trace_nvfp4_shared_amax, name="nvfp4_shared_amax")
nvfp4_trained = op_of(trace_nvfp4_trained, name="nvfp4_trained")
