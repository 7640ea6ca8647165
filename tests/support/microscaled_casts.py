"""Casts to microscaled formats against the oracle."""

import math

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.lowerings import install
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import SCOPES
from tests.bounds import assert_same_values, scales_of, values_of
from tests.oracle import casts

QUANTIZERS = [
    Quantizer("e4m3", scope="1x32"),
    Quantizer("e5m2", scope="1x32"),
    Quantizer("e4m3", scope="32x32"),
    Quantizer("e2m1", scope="1x32"),
    Quantizer("e2m1", scope="32x32"),
    Quantizer("e2m1", scope="1x16"),
    Quantizer("e2m1", scope="16x16"),
    Quantizer("e3m2", scope="1x32"),
    Quantizer("e2m3", scope="32x32"),
]


SIZES = [(1, 1), (3, 17), (33, 70), (64, 96), (40, 130)]


def amaxes(x: Tensor, quantizer: Quantizer) -> tuple[Tensor | None, float | None]:
    """The tensor's, as the op and as the oracle find it, where scales have two levels."""
    if not quantizer.granularity.two_level:
        return None, None
    found, expected = ops.tensor_amax(x), casts.tensor_amax(x)
    assert found.dtype == torch.float32 and found.shape == ()
    assert found.item() == expected or math.isnan(expected) == math.isnan(found.item()) is True
    return found, expected


def check(x: Tensor, quantizer: Quantizer, results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (data, scale_inv), (values, value) = results, expected
    scope = quantizer.granularity
    assert data.dtype == quantizer.format.dtype and data.is_contiguous()
    assert scale_inv.dtype == scope.scale.dtype and scale_inv.is_contiguous()
    assert data.shape == (x.shape[0], quantizer.stored(x.shape[1]))
    assert scale_inv.shape == scope.scale_shape(*x.shape)
    assert_same_values(scales_of(scale_inv), value)
    assert_same_values(values_of(data, quantizer.element), values)


def check_both(x: Tensor, quantizer: Quantizer, quantize=ops.quantize, quantize_rowcol=ops.quantize_rowcol) -> None:
    amax, expected = amaxes(x, quantizer)
    check(x, quantizer, quantize(x, quantizer, amax), casts.quantize(x, quantizer, expected))
    data, scale_inv, data_t, scale_inv_t = quantize_rowcol(x, quantizer, amax)
    values, value, values_t, value_t = casts.quantize_rowcol(x, quantizer, expected)
    check(x, quantizer, (data, scale_inv), (values, value))
    check(x.t(), quantizer, (data_t, scale_inv_t), (values_t, value_t))


def compiled(dynamic: bool = False):
    install()
    functions = [
        lambda x, quantizer, amax: torch.ops.te_inductor.quantize(x, quantizer, amax),
        lambda x, quantizer, amax: torch.ops.te_inductor.quantize_rowcol(x, quantizer, amax),
    ]
    return [torch.compile(function, backend="inductor", fullgraph=True, dynamic=dynamic) for function in functions]


def gemm_of(scopes: tuple[str, str]) -> Gemm:
    """A GEMM of the first elements that may have these scopes."""
    return Gemm.of("fprop", *(Quantizer(SCOPES[scope].elements[0], scope=scope) for scope in scopes))


PAIRS = [("1x32", "1x32"), ("1x32", "32x32"), ("1x16", "1x16"), ("1x16", "16x16")]


STOCHASTIC = Quantizer("e2m1", scope="1x16", stochastic=True)
