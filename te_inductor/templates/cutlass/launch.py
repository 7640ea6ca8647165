"""The function that compiled graphs call: `torch._scaled_mm`'s operands, a tile, and a kernel that `build.py` made.

Nothing of CUTLASS is imported. A kernel that cannot be built or loaded is replaced by cuBLASLt, and named once.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from te_inductor.errors import FallbackWarning
from te_inductor.templates.cutlass import build
from te_inductor.templates.cutlass.scaled_mm import Kernel, Tile, kernel_of


def scaled_mm(
    a: Tensor,  # (M, K), contiguous
    b: Tensor,  # (K, N), the transpose of a contiguous one
    a_scale: Tensor,  # fp32, () or (M, 1)
    b_scale: Tensor,  # fp32, () or (1, N)
    bias: Tensor | None = None,  # (N,), of out's dtype
    *,
    tile: tuple[int, int, int, int, bool, int],  # the fields of a `Tile`
    by_row: bool,
    fast_accum: bool,
    out: Tensor,  # (M, N), contiguous
) -> Tensor:
    # Hashed in each call, so a tuple and no dataclass.
    call = _function(tile, a.dtype, b.dtype, out.dtype, by_row, bias is not None, fast_accum)
    if call is None:
        return torch._scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=out.dtype, use_fast_accum=fast_accum, out=out)
    scales = (a_scale.view(1, -1), b_scale.view(1, -1)) if by_row else (a_scale.data_ptr(), b_scale.data_ptr())
    values = (*scales, None, None) if bias is None else (*scales, bias.view(1, -1), None, None)
    clusters = _multiprocessors(a.device) // (tile[2] * tile[3])
    # quack's signature: a, b, d, c, the epilogue's values and its split-K buffers, the tile scheduler's (largest number of
    # clusters at work, raster order, swizzle, semaphore, batch permutation, all-gather), ragged sizes, scale factors.
    call(a, b.t(), out, None, values, (clusters, None, tile[5], None, None, None), None, None, None)
    return out


@functools.cache
def _function(
    tile: tuple[Any, ...],
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    by_row: bool,
    bias: bool,
    fast_accum: bool,
) -> Any:
    kernel = kernel_of(Tile(*tile), a, b, out, by_row, bias, fast_accum)
    try:
        return _load(kernel)
    except Exception as error:
        warnings.warn(
            f"te_inductor: cuBLASLt multiplies where CUTLASS was chosen ({Tile(*tile)}), because its kernel could not be"
            f" built or loaded:\n{error}",
            FallbackWarning,
            stacklevel=3,
        )
        return None


def _load(kernel: Kernel) -> Any:
    path = build.library(kernel)
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[build.FUNCTION]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
