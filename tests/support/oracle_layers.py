"""Layers against the float64 oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    Gemm,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Slots,
)
from tests.bounds import assert_within, gemm_error, sum_error
from tests.oracle import casts as reference
from tests.support.layers import linears

RECIPES = {
    "hybrid": Float8CurrentScaling(),
    "e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "options": Float8CurrentScaling(
        fp8_quant_fwd_inp=QParams(power_2_scale=True),
        fp8_quant_fwd_weight=QParams(amax_epsilon=0.3),
        fp8_quant_bwd_grad=QParams(power_2_scale=True, amax_epsilon=2.0),
    ),
    "rowwise": Float8RowwiseScaling(),
    "rowwise options": Float8RowwiseScaling(fp8_format=Format.HYBRID, power_2_scale=False, amax_epsilon=0.3),
    "block": Float8BlockScaling(),
    "block options": Float8BlockScaling(
        fp8_format=Format.HYBRID,
        fp8_quant_fwd_inp=QParams(amax_epsilon=0.3),
        fp8_quant_bwd_grad=QParams(),
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
    ),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4 options": MXFP4BlockScaling(disable_rht=True, disable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 options": NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True),
    "nvfp4 4 over 6": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
    "nvfp4 4 over 6 options": NVFP4BlockScaling(
        nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="none", nvfp4_4over6_err_mode="MSE"
    ),
    "nvfp4 rows": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "nvfp4 rows, 4 over 6": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all"),
    "mxfp8 options": MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
}


SEEDS = (7, 8)  # of the copies of dy that are rounded stochastically


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots) -> Tensor:
    return linears(x, [weight], [] if bias is None else [bias], slots, x.dtype)[0]


def through(backend: str):
    """The same layer by each road: called, traced by AOTAutograd, compiled, and as `te` finds it in a user's
    function."""
    if backend == "te":

        def user(x, weight, bias, recipe):
            options = {"recipe": recipe, "fallback": "silent" if recipe.slots().fprop.microscaled else "error"}
            return torch.compile(F.linear, backend="te", fullgraph=True, options=options)(x, weight, bias)

        return user
    made = linear if backend == "called" else torch.compile(linear, backend=backend, fullgraph=True)
    return lambda x, weight, bias, recipe: made(x, weight, bias, recipe.slots())


def check(road, m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool, recipe) -> None:
    x = torch.randn(m, k).to(dtype).requires_grad_()
    weight = (torch.randn(n, k) / k**0.5).to(dtype).requires_grad_()
    bias = torch.randn(n).to(dtype).requires_grad_() if with_bias else None
    dy = torch.randn(m, n).to(dtype)
    y = road(x, weight, bias, recipe)
    y.backward(dy)
    check_against_oracle(x, weight, bias, recipe, dy, y)


def error(a: reference.Copy, b: reference.Copy, bias: Tensor | None, dtype: torch.dtype, gemm: Gemm) -> Tensor:
    return gemm_error(a.data, a.scale_inv, b.data, b.scale_inv, bias, dtype, gemm, reference.alpha(a, b, gemm))


def check_against_oracle(x, weight, bias, recipe, dy, y) -> None:
    """`x`, `weight` and `bias` hold their gradients. Operands agree bit for bit, so the errors are those of the
    GEMMs."""
    dtype, slots = y.dtype, recipe.slots()
    x_, w, b = x.detach(), weight.detach(), None if bias is None else bias.detach()
    expected = reference.linear(x_, w, b, recipe, dy, SEEDS)
    x_row, x_col = reference.copies(x_, slots.input)
    w_row, w_col = reference.copies(w, slots.weight)
    g_row, g_col = reference.copies(dy, slots.grad_output, SEEDS)
    assert_within(y, expected[0], error(x_row, w_row, b, dtype, slots.fprop), "y")
    assert_within(x.grad, expected[1], error(g_row, w_col, None, x.dtype, slots.dgrad), "dx")
    assert_within(weight.grad, expected[2], error(g_col, x_col, None, weight.dtype, slots.wgrad), "dw")
    if bias is not None:
        assert_within(bias.grad, expected[3], sum_error(dy, bias.dtype), "db")


class Calls(TorchDispatchMode):
    """Lists the ops of this package that run, or what `of` makes of an op's name and arguments, where that is not
    None."""

    supports_higher_order_operators = True  # those that AOTAutograd wraps changes of state in

    def __init__(self, of=lambda name, args: name):
        super().__init__()
        self.names: list[str] = []
        self.of = of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", "") == "te_inductor" and (name := self.of(func._opname, args)) is not None:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
