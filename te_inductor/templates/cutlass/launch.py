"""The functions that compiled graphs call: operands, a tile, and a kernel that `build.py` made.

Nothing of CUTLASS is imported. A kernel that cannot be built or loaded is replaced by cuBLASLt, and named once.
They run on the device that their tensors are on, whichever device is current; Triton's do so by their launcher
(templates/triton/launcher.py).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from te_inductor import targets
from te_inductor.errors import FallbackWarning
from te_inductor.kernels.cutlass_tiles import ALIGNED, ROUNDED, Kernel, Shape, Tile, kernel_of
from te_inductor.kernels.problem import NOTHING, OUTPUT
from te_inductor.numerics.activation import Activation, Gating, PointwiseStep
from te_inductor.recipes.formats import E2M1, ELEMENTS, ROW, SCOPES
from te_inductor.recipes.quantizers import Gemm, Quantizer
from te_inductor.runtime.eager import Written, dense
from te_inductor.templates.cutlass import build

P = ParamSpec("P")
R = TypeVar("R")


class OnADevice(Protocol):
    @property
    def device(self) -> torch.device: ...


T = TypeVar("T", bound=OnADevice)


def launches(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorator of every function that launches a kernel: while it runs, its first argument's device is current."""

    @functools.wraps(function)
    def on_its_device(first: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = first.device
        if device.type != "cuda" or torch.cuda.current_device() == device.index:
            return function(first, *args, **kwargs)
        with torch.cuda.device(device):
            return function(first, *args, **kwargs)

    return on_its_device


@launches
def scaled_mm(
    a: Tensor,  # (M, K), contiguous
    b: Tensor,  # (K, N), the transpose of a contiguous one
    a_scale: Tensor,  # fp32, (), (M, 1) or (M, K/128) with rows beside each other
    b_scale: Tensor,  # fp32, (), (1, N), (K/128, N) contiguous, or (K/128, N/128) with those of one column beside each other
    *rest: Tensor,  # of out's dtype: the bias, (N,), if there is one; then, contiguous, the (M, N) that is added
    tile: Shape,
    arch: str,
    scope: str,
    fast_accum: bool,
    added: str = NOTHING,
    out: Tensor,  # (M, N), contiguous
) -> Tensor:
    """`torch._scaled_mm` with one scale a tensor, one a row, or scales of blocks, plus what is added."""
    bias, c = (*rest, None, None)[:2] if added == NOTHING else (*[None] * (2 - len(rest)), *rest)
    call = None
    if c is None or c.data_ptr() % ALIGNED == 0:
        call = _function(tile, arch, a.dtype, b.dtype, out.dtype, scope, bias is not None, fast_accum, added)
    if call is None:
        torch._scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=out.dtype, use_fast_accum=fast_accum, out=out)
        return out if c is None else out.add_(c)
    if SCOPES[scope].blocked:
        call(a, b.t(), out, c, a_scale.t(), b_scale, _clusters(a, tile), tile[5])
    else:
        _launch(call, a, b.t(), out, _factors(a_scale, b_scale, scope), bias, tile, c=c)
    return out


@launches
def quantized_mm(
    a: Tensor,  # (M, K), contiguous
    b: Tensor,  # (K, N), the transpose of a contiguous one
    a_scale: Tensor,  # fp32, ()
    b_scale: Tensor,  # fp32, ()
    scale: Tensor,  # fp32, (), of the copy
    *biases: Tensor,  # (N,), of bf16, if there is one
    tile: Shape,
    arch: str,
    scope: str,
    fast_accum: bool,
    steps: tuple[PointwiseStep, ...],  # of an `Activation`
    out: Tensor,  # (M, N) of FP8, contiguous
) -> Tensor:
    """The cast with a known scale of an activation of `torch._scaled_mm`, rounded to bf16 before it."""
    bias, fast = (*biases, None)[0], fast_accum
    call = _function(tile, arch, a.dtype, b.dtype, out.dtype, scope, bias is not None, fast, NOTHING, steps)
    if call is None:
        y = torch._scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=ROUNDED, use_fast_accum=fast)
        [element] = [element for element in ELEMENTS.values() if element.dtype == out.dtype]
        return out.copy_(dense.cast(Activation(steps).of(y), scale, Quantizer(element.name)))
    factors = (*_factors(a_scale, b_scale, scope), scale.data_ptr())
    _launch(call, a, b.t(), out, factors, bias, tile)
    return out


@launches
def add_scaled_mm(
    total: Written,  # (M, N) fp32, contiguous
    a: Tensor,  # (M, K), contiguous
    a_scale: Tensor,  # fp32, () or (M, 1)
    b: Tensor,  # (N, K), contiguous
    b_scale: Tensor,  # fp32, () or (N, 1)
    gemm: Gemm,
    tile: Tile,
    arch: str,
) -> None:
    """``total += (a * a_scale) @ (b * b_scale).T``: the product is rounded to fp32, and added where it is stored."""
    scope, shape = gemm.scopes[0], tile.shape
    call = None
    if total.data_ptr() % ALIGNED == 0:  # a view of a buffer may begin anywhere
        call = _function(shape, arch, a.dtype, b.dtype, total.dtype, scope, False, gemm.fast_accum, OUTPUT)
    if call is None:
        dense.accumulate_wgrad([total], a, a_scale, b, b_scale, None, gemm)
    else:
        _launch(call, a, b, total, _factors(a_scale, b_scale, scope), None, shape)


@launches
def gated_gradient(
    a: Tensor,  # (M, K), contiguous
    a_scale: Tensor,  # fp32, (K/128 * M,): 1 x 128
    b: Tensor,  # (N, K), contiguous
    b_scale: Tensor,  # fp32, (N/128 * K/128,): 128 x 128
    gate: Tensor,  # (M, N) bf16, rows contiguous
    up: Tensor,  # likewise
    gemm: Gemm,
    gating: Gating,
    quantizer: Quantizer,
    tile: Tile,
    arch: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize_pieces(gating.of(scaled_mm(a, b), gate, up), 1, quantizer)`` with neither sums nor results in memory:
    data and scale_inv, (M, 2 N), and those of the transpose. Results are rounded to bf16 before they are cast, sums are
    not."""
    (m, k), n, dtype = a.shape, b.shape[0], quantizer.format.dtype
    call = None
    if all(x.data_ptr() % ALIGNED == 0 for x in (gate, up)):
        kind = (gemm.scopes[1], False, gemm.fast_accum, NOTHING, None, (gating.steps, gating.results))
        call = _function(tile.shape, arch, a.dtype, b.dtype, dtype, *kind)
    if call is None:
        y = dense.scaled_mm(a, a_scale, b, b_scale, None, gemm, gate.dtype)
        pieces = [value.to(gate.dtype) for value in gating.of(y, gate, up)]
        return dense.quantize_pieces(pieces, 1, quantizer)
    data, data_t = a.new_empty((m, 2 * n), dtype=dtype), a.new_empty((2 * n, m), dtype=dtype)
    scale_inv, scale_inv_t = (a_scale.new_empty(2 * n // 128, m), a_scale.new_empty(m // 128, 2 * n))
    scales = (a_scale.view(-1, m), b_scale.view(-1, k // 128).t())
    call(a, b, gate, up, data, data_t, scale_inv, scale_inv_t, *scales, _clusters(a, tile.shape), tile.swizzle)
    return data, scale_inv.flatten(), data_t, scale_inv_t.flatten()


def _factors(a_scale: Tensor, b_scale: Tensor, scope: str) -> tuple[Any, Any]:
    if scope == ROW.name:
        return a_scale.view(1, -1), b_scale.view(1, -1)
    return a_scale.data_ptr(), b_scale.data_ptr()


@launches
def microscaled_mm(
    a: Tensor,  # (M, K) fp8, or (M, K/2) bytes of two E2M1 values
    b: Tensor,  # (N, K), or (N, K/2)
    a_scale: Tensor,  # (bytes,), in the order of Note [Swizzled scales]
    b_scale: Tensor,
    *rest: Tensor,  # alpha, () fp32, of scales of two levels; then the bias, (N,), of out's dtype, if there is one
    tile: Shape,
    arch: str,
    scope: str,
    out: Tensor,  # (M, N), contiguous
) -> Tensor:
    """MXFP8 or NVFP4, scaled by the tensor cores, times alpha, plus bias, rounded once."""
    alpha, bias = _alpha_and_bias(scope, rest)
    packed = E2M1.packed if a.dtype == E2M1.dtype else 1
    across = -(-a.shape[1] * packed // (4 * SCOPES[scope].block[1]))  # tiles of 4 blocks
    a, b, a_scale, b_scale = _viewed(a, b, a_scale, b_scale, scope)
    call = _function(tile, arch, a.dtype, b.dtype, out.dtype, scope, bias is not None, False)
    if call is None:
        return _library(a, b, a_scale, b_scale, alpha, bias, out)
    scales = (scale.view(-1, across, 32, 4, 4) for scale in (a_scale, b_scale))
    _launch(call, a, b, out, () if alpha is None else (alpha.data_ptr(),), bias, tile, *scales)
    return out


def library_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *rest: Tensor,
    scope: str,
    out: Tensor,
) -> Tensor:
    """Computes what `microscaled_mm` does, by cuBLASLt."""
    return _library(*_viewed(a, b, a_scale, b_scale, scope), *_alpha_and_bias(scope, rest), out)


def _library(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor | None, bias: Tensor | None, out: Tensor
) -> Tensor:
    torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=out.dtype, use_fast_accum=False, out=out)
    if alpha is not None:
        out.mul_(alpha)
    return out if bias is None else out.add_(bias)


def _alpha_and_bias(scope: str, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    alpha = rest[:1] if SCOPES[scope].two_level else ()
    bias = rest[len(alpha) :]
    return alpha[0] if alpha else None, bias[0] if bias else None


def _viewed(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, scope: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes as the dtypes that libraries know."""
    if a.dtype == E2M1.dtype:
        a, b = a.view(E2M1.library), b.view(E2M1.library)
    dtype = SCOPES[scope].scale.library
    return a, b, a_scale.view(dtype), b_scale.view(dtype)


def _launch(
    call: Any,
    a: Tensor,  # (M, K)
    b: Tensor,  # (N, K)
    out: Tensor,
    factors: tuple[Any, ...],  # of the epilogue
    bias: Tensor | None,
    tile: Shape,
    *scales: Tensor,  # of blocks
    c: Tensor | None = None,  # (M, N), that is added
) -> None:
    values = factors if bias is None else (*factors, bias.view(1, -1))
    # quack's signature: a, b, d, c, the epilogue's values and its split-K buffers, the tile scheduler's (largest number
    # of clusters at work, raster order, swizzle, semaphore, batch permutation, all-gather), ragged sizes, scale
    # factors.
    scheduler = (_clusters(a, tile), None, tile[5], None, None, None)
    call(a, b, out, c, (*values, None, None), scheduler, None, *(scales or (None, None)))


def _clusters(a: Tensor, tile: Shape) -> int:
    """How many are at work at a time."""
    return targets.multiprocessors(a.device) // (tile[2] * tile[3])


@functools.cache
def _function(
    tile: Shape,
    *problem: Any,  # the rest of what `kernel_of` takes
) -> Any:
    kernel = kernel_of(Tile(*tile), *problem)
    try:
        return _load(kernel)
    except Exception as error:
        warnings.warn(
            f"te_inductor: cuBLASLt multiplies where CUTLASS was chosen ({Tile(*tile)}), because its kernel could not"
            f" be built or loaded:\n{error}",
            FallbackWarning,
            stacklevel=3,
        )
        return None


def _load(kernel: Kernel) -> Any:
    path = build.library(kernel)
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[build.FUNCTION]
