"""The float64 oracle: what every kernel of this package is held to, written a second time from docs/numerics.md.

It shares the formats (`recipes/formats.py`), their alignment and the recipe fields with the rest of the package, and no
arithmetic: casts take values apart into exponent and mantissa, scales are computed as Python floats, sums are float64.
Values of a low-precision tensor, and scales, are returned as float64 tensors that hold exactly the values of the
element and of fp32.

A float64 input is read as fp32 first, as the fp32 model would hold it.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from te_inductor.recipes import DelayedScaling, Gemm, Quantizer, Recipe
from te_inductor.recipes.formats import SCOPES, Element
from tests.oracle import microscaling
from tests.oracle.elements import FP32_MAX, amaxes, fp32, padded, round_to_element

_FP32_TINY = 2.0**-126  # smallest normal
_LARGEST = {torch.bfloat16: (2 - 2.0**-7) * 2.0**127, torch.float16: 65504.0}
_TENSOR = Gemm("any")  # one scale for each operand, or one for each of its rows


def encode_scale(amax: float, quantizer: Quantizer, dtype: torch.dtype = torch.float32) -> float:
    """The fp32 factor that maps `amax` to the element's largest value; 1 where amax is 0, inf or NaN.

    An infinite quotient becomes the largest fp32 value, or that of the tensor's `dtype` where blocks have the scales.

    Source: TransformerEngine, common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    epsilon = fp32(quantizer.amax_epsilon)
    if amax < epsilon:
        amax = epsilon
    if not (math.isfinite(amax) and amax > 0):
        return 1.0
    scale = fp32(quantizer.format.max / amax)
    if scale == math.inf:
        scale = _LARGEST.get(dtype, FP32_MAX) if quantizer.scope in ("1x128", "128x128") else FP32_MAX
    if quantizer.power_2_scale:
        _, exponent = math.frexp(scale)
        scale = math.ldexp(0.5, exponent)
    return scale


def _blocks(x: Tensor, scope: str) -> Tensor:  # (blocks, elements of a block)
    """The blocks in the order of rows; where one is cut off, zeros, which change no amax that counts."""
    if scope == "tensor":
        return x.reshape(1, -1)
    if scope == "row":
        return x
    if scope == "1x128":
        whole = padded(x, 1, 128)
        return whole.reshape(whole.numel() // 128, 128)
    whole = padded(x, 128, 128)
    squares = whole.reshape(whole.shape[0] // 128, 128, whole.shape[1] // 128, 128).transpose(1, 2)
    return squares.reshape(whole.numel() // 128**2, 128**2)


def encode_scales(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # (), (R, 1), or of blocks (scales,), float64
    """The factors of the blocks that the scope says, of a tensor that was of `dtype`: of 1 x 128 by columns of blocks,
    of 128 x 128 by rows of them."""
    scope = quantizer.scope
    scales = [encode_scale(amax, quantizer, dtype) for amax in amaxes(_blocks(x, scope))]
    made = torch.tensor(scales, dtype=torch.float64)
    if scope == "1x128":
        return made.reshape(x.shape[0], -(-x.shape[1] // 128)).t().flatten()
    return made.reshape({"tensor": (), "row": (x.shape[0], 1), "128x128": (-1,)}[scope])


def spread(
    scale: Tensor,  # as `encode_scales` has them
    scope: str,
    rows: int,
    columns: int,
) -> Tensor:  # broadcasts to (R, C)
    """The scale of each element."""
    if microscaling.is_microscaled(scope):
        return microscaling.spread(scale, scope, rows, columns)
    row, column, across = torch.arange(rows)[:, None], torch.arange(columns)[None, :], -(-columns // 128)
    if scope == "1x128":
        return scale[column // 128 * rows + row]
    return scale[row // 128 * across + column // 128] if scope == "128x128" else scale


def _cast(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """``x * scale`` as an fp32 product (48 bits are exact in float64, so this rounds once), then the element's
    rounding; NaN where x is infinite."""
    product = (x.double() * scale).to(torch.float32).double()
    return round_to_element(torch.where(x.isinf(), math.nan, product), quantizer.format)


def quantize(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: float | Tensor | None = None,  # of the tensor, or (R, 1) of its rows, where scales have two levels
    seed: int | None = None,  # of stochastic rounding
) -> tuple[Tensor, Tensor]:  # data (R, C padded) float64, scale_inv as `encode_scales` has them
    """Current scaling. ``x ~= data[:, :C] * spread(scale_inv)[:, :C]``."""
    if microscaling.is_microscaled(quantizer.scope):
        return microscaling.quantize(x, quantizer, amax, seed)
    scale = encode_scales(x.float(), quantizer, x.dtype)
    data = _cast(x.float(), spread(scale, quantizer.scope, *x.shape), quantizer)
    return padded(data, 1, SCOPES[quantizer.scope].alignment), (1.0 / scale).to(torch.float32).double()


def quantize_rowcol(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, C padded), scale_inv, data_t (C, R padded), scale_inv_t
    """The tensor and its transpose, each quantized by itself; scales of the tensor or of squares are the same for
    both."""
    return *quantize(x, quantizer, amax), *quantize(x.t(), quantizer, amax)


def tensor_amax(x: Tensor) -> float:
    """The largest magnitude; NaN if any value is NaN; 0 of an empty tensor."""
    return amaxes(x.float().reshape(1, -1))[0]


def first_amax(x: Tensor, quantizer: Quantizer) -> float | Tensor | None:
    """What the first of two levels follows from: of the tensor, or (R, 1) of its rows."""
    if not microscaling.is_two_level(quantizer.scope):
        return None
    return (
        torch.tensor(amaxes(x.float()), dtype=torch.float64)[:, None]
        if quantizer.factor_scope == "row"
        else tensor_amax(x)
    )


class Copy(NamedTuple):
    """An operand of a GEMM."""

    data: Tensor  # (R, C padded) float64
    scale_inv: Tensor
    amax: float | Tensor | None = None  # of the tensor, or (R, 1) of its rows, where scales have two levels


def copies(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    seeds: tuple[int, int] | None = None,  # for each copy, where rounding is stochastic
) -> tuple[Copy, Copy]:
    """The rowwise and the columnwise copy, as the layer has them."""
    x_t = microscaling.hadamard(x.t()) if quantizer.hadamard else x.t()
    row, column = (_copy(matrix, quantizer, seed) for matrix, seed in zip((x, x_t), seeds or (None, None), strict=True))
    return row, column


def _copy(x: Tensor, quantizer: Quantizer, seed: int | None) -> Copy:
    amax = first_amax(x, quantizer)
    if quantizer.stochastic and seed is None:
        raise ValueError("a copy that is rounded stochastically wants a seed")
    return Copy(*quantize(x, quantizer, amax, seed if quantizer.stochastic else None), amax)


def product(
    a: Copy,
    b: Copy,
    bias: Tensor | None,
    gemm: Gemm,
) -> Tensor:  # (M, N) float64
    """What a GEMM makes of its operands."""
    return scaled_mm(a.data, a.scale_inv, b.data, b.scale_inv, bias, gemm, alpha(a, b, gemm))


def alpha(a: Copy, b: Copy, gemm: Gemm) -> float | Tensor | None:
    """What multiplies the product, where scales have two levels."""
    return None if a.amax is None or b.amax is None else microscaling.alpha(a.amax, b.amax, gemm.scale_maxima)


def dequantize(
    data: Tensor,  # (R, C) values of an element
    scale_inv: Tensor,  # of the scope
    scope: str = "tensor",
) -> Tensor:  # (R, C) float64
    """Exact: 4 bits times 24. Of two-level scales in units of the tensor's factor."""
    return data.double() * spread(scale_inv.double(), scope, *data.shape)


def scaled_mm(
    a: Tensor,  # (M, K) values of an element
    a_scale_inv: Tensor,  # () or (M, 1), or of gemm.scopes[0]
    b: Tensor,  # (N, K) values of an element
    b_scale_inv: Tensor,  # () or (N, 1), or of gemm.scopes[1]
    bias: Tensor | None = None,  # (N,)
    gemm: Gemm = _TENSOR,
    alpha: float | Tensor | None = None,
) -> Tensor:  # (M, N) float64
    """``alpha * (a * a_scale_inv) @ (b * b_scale_inv).T + bias``, scales outside where they do not change along K."""
    if gemm.blocked:
        y = dequantize(a, a_scale_inv, gemm.scopes[0]) @ dequantize(b, b_scale_inv, gemm.scopes[1]).t()
    else:
        y = (a.double() @ b.double().t()) * a_scale_inv.double() * b_scale_inv.double().t()
    y = y if alpha is None else y * alpha
    return y if bias is None else y + bias.double()


def linear(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    recipe: Recipe,
    dy: Tensor,  # (M, N)
    seeds: tuple[int, int] | None = None,  # of dy's copies
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # y (M, N), dx (M, K), dw (N, K), db (N,); float64
    """The linear layer and its gradients, each operand quantized from high precision.

    Source: TransformerEngine, pytorch/module/linear.py: which operand of which GEMM is which copy; bias and its
    gradient are never quantized."""
    return linear_forward(x, weight, bias, recipe), *linear_backward(x, weight, recipe, dy, seeds)


def linear_forward(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    recipe: Recipe,
) -> Tensor:  # (M, N) float64
    """The first of `linear`'s results."""
    slots = recipe.slots()
    return product(copies(x, slots.input)[0], copies(weight, slots.weight)[0], bias, slots.fprop)


def linear_backward(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    recipe: Recipe,
    dy: Tensor,  # (M, N)
    seeds: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # dx (M, K), dw (N, K), db (N,); float64
    """The other three of `linear`'s results."""
    slots = recipe.slots()
    g_row, g_col = copies(dy, slots.grad_output, seeds)
    dx = product(g_row, copies(weight, slots.weight)[1], None, slots.dgrad)
    dw = product(g_col, copies(x, slots.input)[1], None, slots.wgrad)
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
        amax = amaxes(x.float().reshape(1, -1))[0]
        self.recorded = math.nan if math.isnan(amax) or math.isnan(self.recorded) else max(amax, self.recorded)

    @property
    def has_history(self) -> bool:
        """Whether the scale follows from anything."""
        return bool(self.past) or self.scale != 1.0

    def scale_of_first(self, x: Tensor) -> float:
        """The scale of a tensor in a step in which some quantizer of the graph has no history: from its own amax."""
        amax = amaxes(x.float().reshape(1, -1))[0]
        scale = ScalingHistory(self.recipe, self.element)._scale(amax) if 0 < amax < math.inf else math.nan
        if math.isnan(scale):
            return 1.0 if self.recipe.scaling_factor_compute_algo else fp32(2.0**-self.recipe.margin)
        return min(max(scale, _FP32_TINY), FP32_MAX)

    def update(self) -> None:
        observed = [self.recorded] if 0 < self.recorded < math.inf else []
        chosen = self._chosen(observed)
        scale = self._scale(chosen) if 0 < chosen < math.inf else math.nan
        if not math.isnan(scale):
            self.scale = min(max(scale, _FP32_TINY), FP32_MAX)
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
            return fp32(self.element.max / 2.0**self.recipe.margin / chosen)
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
    return padded(_cast(x.float(), known, quantizer), 1, SCOPES[quantizer.scope].alignment), (1.0 / known).to(
        torch.float32
    ).double()
