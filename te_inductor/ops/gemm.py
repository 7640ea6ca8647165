"""Low-precision GEMMs, and what is done with a weight gradient's: added to a total, or left for later. Which GEMM of a
linear layer reads which copy::

    fprop  y[M,N]  = x[M,K] wᵀ    x rowwise,  w rowwise
    dgrad  dx[M,K] = dy[M,N] w    dy rowwise, w columnwise
    wgrad  dw[N,K] = dyᵀ x        dy columnwise, x columnwise
"""

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.numerics.arithmetic import reciprocal
from te_inductor.ops.casts import Copy
from te_inductor.ops.definition import define
from te_inductor.recipes import Gemm
from te_inductor.runtime.eager import dense
from te_inductor.runtime.gradients import deferred_wgrads

_GEMM = constant_type_name(Gemm)


def scaled_mm_fake(
    a: Tensor,  # (M, K), low precision
    a_scale_inv: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (N, K), low precision
    b_scale_inv: Tensor,  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    bias: Tensor | None,  # (N,)
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # (), (M, 1) or (1, N), factor of the product, of two-level scales
    added: Tensor | None = None,  # (M, N), of out_dtype
) -> Tensor:  # (M, N)
    torch._check(a.shape[1] == b.shape[1], lambda: f"contraction sizes {a.shape[1]} and {b.shape[1]}, expected equal")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


scaled_mm = define(
    f"scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, {_GEMM} g, ScalarType out_dtype,"
    " Tensor? alpha=None, Tensor? added=None) -> Tensor",
    dense.scaled_mm,
    scaled_mm_fake,
)
accumulate_wgrad = define(
    "accumulate_wgrad(Tensor(a!)[] totals, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? alpha,"
    f" {_GEMM} g) -> ()",
    dense.accumulate_wgrad,
    lambda totals, a, a_scale, b, b_scale, alpha, gemm: None,
)
defer_wgrad = define(
    "defer_wgrad(Tensor(a!)[] tickets, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? alpha,"
    f" {_GEMM} g, bool copy=True) -> ()",
    deferred_wgrads.defer_wgrad,
    lambda tickets, a, a_scale, b, b_scale, alpha, gemm, copy=True: None,
)


def product(a: Copy | None, b: Copy | None, bias: Tensor | None, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    *operands, alpha = operands_of(a, b, gemm)
    return scaled_mm(*operands, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]


def operands_of(a: Copy | None, b: Copy | None, gemm: Gemm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The operands of a GEMM: both copies with their scales, and the product's factor."""
    assert a is not None and b is not None  # they were asked for
    if a.amax is None or b.amax is None:
        return a.data, a.scale_inv, b.data, b.scale_inv, None
    alpha = a.amax * (b.amax.t() if b.amax.dim() else b.amax) * reciprocal(gemm.two_level_max)
    return a.data, a.scale_inv, b.data, b.scale_inv, alpha
