"""The float64 oracle: what every kernel of this package is held to, written a second time from docs/numerics.md.

It shares the formats (`recipes/formats.py`), their alignment and the recipe fields with the rest of the package, and no
arithmetic: casts take values apart into exponent and mantissa, scales are computed as Python floats, sums are float64.
Values of a low-precision tensor, and scales, are returned as float64 tensors that hold exactly the values of the element
and of fp32.

A float64 input is read as fp32 first, as the fp32 model would hold it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_inductor.recipes import DelayedScaling, Gemm, Quantizer, Recipe
from te_inductor.recipes.formats import SCOPES, Element

_FP32_MAX = (2 - 2.0**-23) * 2.0**127
_FP32_TINY = 2.0**-126  # smallest normal
_LARGEST = {torch.bfloat16: (2 - 2.0**-7) * 2.0**127, torch.float16: 65504.0}
_TENSOR = Gemm("any")  # one scale for each operand, or one for each of its rows


def round_to_element(
    x: Tensor,  # (...) float64
    element: Element,
) -> Tensor:  # (...) float64, values of the element
    """Round to nearest, ties to even; saturate, infinities too; keep NaN and the sign of zero.

    Source: OCP 8-bit Floating Point Specification, revision 1.0, section 5.2.1 (saturating mode).
    """
    x = x.clamp(-element.max, element.max)  # max is a value of the element, so clamping first changes no rounding
    _, exponent = torch.frexp(torch.where(x.isnan(), 0.0, x))  # x = f * 2**exponent, 1/2 <= |f| < 1
    leading = (exponent - 1).clamp(min=element.min_exponent)  # exponent of the leading bit, or of a subnormal's
    step = _power_of_two(leading - element.mantissa_bits)
    return torch.round(x / step) * step  # torch.round takes ties to even; x / step is exact


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent for int exponents of normal float64 values, exact (`torch.pow` need not be)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _fp32(value: float) -> float:
    """Round to fp32, to nearest even. Of a float64 quotient of two fp32 values this is the IEEE fp32 quotient: a quotient
    that is no tie differs from every tie (25 bits or fewer) by 2**-49 of itself, and float64 rounds to 2**-53."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def encode_scale(amax: float, quantizer: Quantizer, dtype: torch.dtype = torch.float32) -> float:
    """The fp32 factor that maps `amax` to the element's largest value; 1 where amax is 0, inf or NaN.

    An infinite quotient becomes the largest fp32 value, or that of the tensor's `dtype` where blocks have the scales.

    Source: TransformerEngine, common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    epsilon = _fp32(quantizer.amax_epsilon)
    if amax < epsilon:
        amax = epsilon
    if not (math.isfinite(amax) and amax > 0):
        return 1.0
    scale = _fp32(quantizer.format.max / amax)
    if scale == math.inf:
        scale = _LARGEST.get(dtype, _FP32_MAX) if quantizer.scope in ("1x128", "128x128") else _FP32_MAX
    if quantizer.power_2_scale:
        _, exponent = math.frexp(scale)
        scale = math.ldexp(0.5, exponent)
    return scale


def _amaxes(rows: Tensor) -> list[float]:
    """The largest magnitude of each row; NaN if any value is NaN; 0 of an empty row."""
    if rows.numel() == 0:
        return [0.0] * rows.shape[0]
    amaxes = torch.maximum(-rows.min(1).values, rows.max(1).values)
    return torch.where(rows.isnan().any(1), math.nan, amaxes).tolist()  # type: ignore[no-any-return]


def _blocks(x: Tensor, scope: str) -> Tensor:  # (blocks, elements of a block)
    """The blocks in the order of rows; where one is cut off, zeros, which change no amax that counts."""
    if scope == "tensor":
        return x.reshape(1, -1)
    if scope == "row":
        return x
    if scope == "1x128":
        whole = _padded(x, 1, 128)
        return whole.reshape(whole.numel() // 128, 128)
    whole = _padded(x, 128, 128)
    squares = whole.reshape(whole.shape[0] // 128, 128, whole.shape[1] // 128, 128).transpose(1, 2)
    return squares.reshape(whole.numel() // 128**2, 128**2)


def encode_scales(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # (), (R, 1), (C/128, R) or (R/128, C/128), float64
    """The factors of the blocks that the scope says, of a tensor that was of `dtype`."""
    scope = quantizer.scope
    scales = [encode_scale(amax, quantizer, dtype) for amax in _amaxes(_blocks(x, scope))]
    made, across = torch.tensor(scales, dtype=torch.float64), -(-x.shape[1] // 128)
    if scope == "1x128":
        return made.reshape(x.shape[0], across).t().contiguous()
    return made.reshape({"tensor": (), "row": (x.shape[0], 1), "128x128": (-(-x.shape[0] // 128), across)}[scope])


def spread(
    scale: Tensor,  # (), (R, 1), (C/128, R) or (R/128, C/128)
    scope: str,
    rows: int,
    columns: int,
) -> Tensor:  # broadcasts to (R, C)
    """The scale of each element."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    if scope == "1x128":
        return scale[column // 128, row]
    return scale[row // 128, column // 128] if scope == "128x128" else scale


def _cast(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """``x * scale`` as an fp32 product (48 bits are exact in float64, so this rounds once), then the element's rounding."""
    product = (x.double() * scale).to(torch.float32).double()
    return round_to_element(product, quantizer.format)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x with zeros below and to its right, up to multiples of `rows` and `columns`."""
    whole = x.new_zeros((-(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns))
    whole[: x.shape[0], : x.shape[1]] = x
    return whole


def quantize(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, C padded to 16 or 128) float64, scale_inv as `encode_scales` has them
    """Current scaling. ``x ~= data[:, :C] * spread(scale_inv)[:, :C]``."""
    scale = encode_scales(x.float(), quantizer, x.dtype)
    data = _cast(x.float(), spread(scale, quantizer.scope, *x.shape), quantizer)
    return _padded(data, 1, SCOPES[quantizer.scope].alignment), (1.0 / scale).to(torch.float32).double()


def quantize_rowcol(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, C padded), scale_inv, data_t (C, R padded), scale_inv_t
    """The tensor and its transpose, each quantized by itself; scales of the tensor or of squares are the same for both."""
    return *quantize(x, quantizer), *quantize(x.t(), quantizer)


def dequantize(
    data: Tensor,  # (R, C) values of an element
    scale_inv: Tensor,  # of the scope
    scope: str = "tensor",
) -> Tensor:  # (R, C) float64
    """Exact: 4 bits times 24."""
    return data.double() * spread(scale_inv.double(), scope, *data.shape)


def scaled_mm(
    a: Tensor,  # (M, K) values of an element
    a_scale_inv: Tensor,  # () or (M, 1), or of gemm.scopes[0]
    b: Tensor,  # (N, K) values of an element
    b_scale_inv: Tensor,  # () or (N, 1), or of gemm.scopes[1]
    bias: Tensor | None = None,  # (N,)
    gemm: Gemm = _TENSOR,
) -> Tensor:  # (M, N) float64
    """``(a * a_scale_inv) @ (b * b_scale_inv).T + bias``, scales outside where they do not change along K."""
    if gemm.blocked:
        y = dequantize(a, a_scale_inv, gemm.scopes[0]) @ dequantize(b, b_scale_inv, gemm.scopes[1]).t()
    else:
        y = (a.double() @ b.double().t()) * a_scale_inv.double() * b_scale_inv.double().t()
    return y if bias is None else y + bias.double()


def linear(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    recipe: Recipe,
    dy: Tensor,  # (M, N)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # y (M, N), dx (M, K), dw (N, K), db (N,); float64
    """The linear layer and its gradients, each operand quantized from high precision.

    Source: TransformerEngine, pytorch/module/linear.py: which operand of which GEMM is which copy; bias and its gradient
    are never quantized.
    """
    return linear_forward(x, weight, bias, recipe), *linear_backward(x, weight, recipe, dy)


def linear_forward(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    recipe: Recipe,
) -> Tensor:  # (M, N) float64
    """The first of `linear`'s results."""
    slots = recipe.slots()
    return scaled_mm(*quantize(x, slots.input), *quantize(weight, slots.weight), bias, slots.fprop)


def linear_backward(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    recipe: Recipe,
    dy: Tensor,  # (M, N)
) -> tuple[Tensor, Tensor, Tensor]:  # dx (M, K), dw (N, K), db (N,); float64
    """The other three of `linear`'s results."""
    slots = recipe.slots()
    g, g_scale_inv, g_t, g_t_scale_inv = quantize_rowcol(dy, slots.grad_output)
    _, _, x_t, x_scale_inv = quantize_rowcol(x, slots.input)
    _, _, w_t, w_scale_inv = quantize_rowcol(weight, slots.weight)
    dx = scaled_mm(g, g_scale_inv, w_t, w_scale_inv, None, slots.dgrad)
    dw = scaled_mm(g_t, g_t_scale_inv, x_t, x_scale_inv, None, slots.wgrad)
    return dx, dw, dy.double().sum(0)


@dataclass
class ScalingHistory:
    """One quantizer of delayed scaling. Source: TransformerEngine, pytorch/quantization.py and
    common/recipe/delayed_scaling.cu, but for amaxes of 0, inf and NaN, which are no observations here.
    """

    recipe: DelayedScaling
    element: Element
    scale: float = 1.0
    recorded: float = 0.0  # since the last update; NaN wins
    past: list[float] = field(default_factory=list)  # observations of earlier steps, oldest first

    def record(self, x: Tensor) -> None:
        amax = _amaxes(x.float().reshape(1, -1))[0]
        self.recorded = math.nan if math.isnan(amax) or math.isnan(self.recorded) else max(amax, self.recorded)

    def update(self) -> None:
        observed = [self.recorded] if 0 < self.recorded < math.inf else []
        chosen = self._chosen(observed)
        scale = self._scale(chosen) if 0 < chosen < math.inf else math.nan
        if not math.isnan(scale):
            self.scale = min(max(scale, _FP32_TINY), _FP32_MAX)
        self.past = (self.past + observed)[-self._kept() :] if self._kept() else []
        self.recorded = 0.0

    def _kept(self) -> int:
        return self.recipe.amax_history_len - 1

    def _chosen(self, observed: list[float]) -> float:
        algorithm = self.recipe.amax_compute_algo
        if callable(algorithm):
            rows = [observed or [0.0], *([amax] for amax in self.window()[1:])]
            return float(algorithm(torch.tensor(rows, dtype=torch.float32)).item())
        return max([*self.past, *observed], default=0.0) if algorithm == "max" else max(observed, default=0.0)

    def _scale(self, chosen: float) -> float:
        algorithm = self.recipe.scaling_factor_compute_algo
        if algorithm is None:
            return _fp32(self.element.max / 2.0**self.recipe.margin / chosen)
        amax, scale = (torch.tensor([value], dtype=torch.float32) for value in (chosen, self.scale))
        return float(algorithm(amax, scale, self.element.max, self.recipe).item())

    def window(self) -> list[float]:
        """TransformerEngine's amax_history: what was recorded since the last update, then the past, newest last."""
        return [self.recorded, *[0.0] * (self._kept() - len(self.past)), *self.past]


def quantize_known(
    x: Tensor,  # (R, C)
    scale: float,
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, C padded to 16) float64, scale_inv () float64
    """A cast with a scale that was known before x was."""
    known = torch.tensor(scale, dtype=torch.float64)
    return _padded(_cast(x.float(), known, quantizer), 1, SCOPES[quantizer.scope].alignment), (1.0 / known).to(
        torch.float32
    ).double()
