"""Low-precision GEMMs, and what is done with a weight gradient's: added to a total, or left for later. Which GEMM of a
linear layer reads which copy::

    fprop  y[M,N]  = x[M,K] wᵀ    x rowwise,  w rowwise
    dgrad  dx[M,K] = dy[M,N] w    dy rowwise, w columnwise
    wgrad  dw[N,K] = dyᵀ x        dy columnwise, x columnwise
"""

from typing import Any

import torch
from torch import Tensor

from te_inductor.numerics.arithmetic import reciprocal
from te_inductor.ops.casts import Copy
from te_inductor.recipes import Gemm
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import dense
from te_inductor.runtime.gradients import deferred_wgrads


def product_like(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Any,
    bias: Any,
    gemm: Gemm,
    out_dtype: torch.dtype,
    *_: Any,
    **__: Any,
) -> Tensor:
    """The fake of `scaled_mm`."""
    torch._check(a.shape[1] == b.shape[1], lambda: f"contraction sizes {a.shape[1]} and {b.shape[1]}, expected equal")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


scaled_mm = op_of(dense.scaled_mm, product_like)
accumulate_wgrad = op_of(dense.accumulate_wgrad, lambda *_, **__: None)
defer_wgrad = op_of(deferred_wgrads.defer_wgrad, lambda *_, **__: None)


def product(a: Copy | None, b: Copy | None, bias: Tensor | None, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    *operands, alpha = operands_of(a, b, gemm)
    if gemm.is_high and bias is None:  # for Inductor, which knows this one
        return torch.mm(operands[0], operands[2].t()).to(out_dtype)
    return scaled_mm(*operands, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]


def operands_of(a: Copy | None, b: Copy | None, gemm: Gemm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The operands of a GEMM: both copies with their scales, and the product's factor."""
    assert a is not None and b is not None  # they were asked for
    if a.amax is None or b.amax is None:
        return a.data, a.scale_inv, b.data, b.scale_inv, None
    alpha = a.amax * (b.amax.t() if b.amax.dim() else b.amax) * reciprocal(gemm.two_level_max)
    return a.data, a.scale_inv, b.data, b.scale_inv, alpha
