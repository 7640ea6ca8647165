"""Runs the kernels of stored weights in Triton's interpreter and compares:

TRITON_INTERPRET=1 python -m tests.offline.nvfp4_kernels
"""

import functools
import itertools
import os
from unittest import mock

import torch

from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.kernels.nvfp4_linear import NVFP4Config, supports
from te_inductor.numerics import nvfp4
from te_inductor.templates.triton import (
    decode_attention,
    fp8_small_m,
    nvfp4_expand,
    nvfp4_linear,
    nvfp4_store,
    partial_sums,
)
from tests.hastened import WHOLE
from tests.offline.interpret import mend_interpreter
from tests.support.kernels import stored as problem

# Each with sizes that fill no tile: M, N, K.
LINEAR = [
    (NVFP4Config("plain", 16, 64, 64, splits=1, warps=4, shares=1, stages=3), (3, 37, 320)),
    (NVFP4Config("plain", 16, 64, 64, splits=2, warps=4, shares=1, stages=3), (17, 70, 256)),
]


# Rows, columns at a time, splits, stages, rows of b, warps; M, N, K. Splits of 3 share 5 blocks of columns.
FP8 = [
    ((16, 128, 1, 8, 64, 4), (3, 37, 384)),
    ((16, 256, 2, 4, 64, 4), (21, 70, 512)),
    ((16, 256, 3, 4, 64, 4), (5, 70, 1280)),
    ((32, 128, 1, 4, 64, 4), (20, 64, 128)),
    ((64, 128, 3, 8, 64, 4), (64, 70, 640)),
    *(((128, 128, 3, 4, 128, 8), (m, 150, 640)) for m in (65, 129, 256)),
]


def weight(n: int, k: int) -> tuple[torch.Tensor, ...]:
    codes, block_scale, tensor_scale = nvfp4.quantize(torch.randn(n, k) * torch.exp2(torch.randint(-6, 6, (n, 1))))
    return nvfp4.store(codes), block_scale, tensor_scale


def linear(config: NVFP4Config, m: int, n: int, k: int) -> None:
    """Each product is exact in fp32, K of them are summed there; the tensor's scale is a rounding of it and of a
    sum."""
    stored, block_scale, tensor_scale = weight(n, k)
    x = torch.randn(m, k).bfloat16()
    assert supports(config, problem(m, n, k, x.dtype)) is None
    given = nvfp4_linear.arranged(x, config)
    parts = nvfp4_linear.partial_sums(given, stored, block_scale, tensor_scale, config, torch.float32, assembly=False)
    assert parts.shape == (config.splits, m, n)
    wide = nvfp4.values(stored, block_scale).double() * tensor_scale.double()
    error = (parts.double().sum(0) - x.double() @ wide.t()).abs()
    assert (error <= (k + 2) * 2.0**-24 * (x.double().abs() @ wide.abs().t())).all(), config
    expected = functools.reduce(torch.add, parts)  # in this order
    for dtype in (torch.bfloat16, torch.float32):
        y = partial_sums.add_up(parts, dtype, assembly=False)
        assert torch.equal(y, expected.to(dtype)), config


def fp8(config: small_m.SmallMConfig, m: int, n: int, k: int, of_rows: tuple[bool, bool]) -> None:
    """Each product is exact in fp32, K of them are summed there; both scales are roundings."""
    a, b = ((torch.randn(rows, k) * 50).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = [torch.rand(rows, 1) + 0.5 if each else torch.rand(()) for rows, each in zip((m, n), of_rows, strict=True)]
    parts = fp8_small_m.partial_sums(a, scales[0], b, scales[1], config, torch.float32, assembly=False)
    assert parts.shape == (config.splits, m, n)
    wide = [x.double() * scale.double() for x, scale in zip((a, b), scales, strict=True)]
    error = (parts.double().sum(0) - wide[0] @ wide[1].t()).abs()
    assert (error <= (k + 3) * 2.0**-24 * (wide[0].abs() @ wide[1].abs().t())).all(), config


def fp8_special(config: small_m.SmallMConfig, m: int, n: int, k: int) -> None:
    """A NaN of a takes its row of the result, one of b its column; zeros are zeros."""
    a, b = (torch.randn(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    a[1, k - 3], a[2], b[n - 2, 3] = torch.nan, 0.0, torch.nan
    scales = torch.rand(m, 1) + 0.5, torch.rand(n, 1) + 0.5
    y = fp8_small_m.partial_sums(a, scales[0], b, scales[1], config, torch.float32, assembly=False).sum(0)
    expected = torch.zeros(m, n, dtype=torch.bool)
    expected[1], expected[:, n - 2] = True, True
    assert torch.equal(y.isnan(), expected) and (y[2][~expected[2]] == 0).all(), config


def expand(n: int, k: int) -> None:
    stored, block_scale, tensor_scale = weight(n, k)
    for given, expected in zip(
        nvfp4_expand.recast(stored, block_scale, tensor_scale, assembly=False),
        nvfp4.recast(stored, block_scale, tensor_scale),
        strict=True,
    ):
        assert torch.equal(given.float(), expected.float()), (n, k)
    for dtype in (torch.bfloat16, torch.float16):
        wide = nvfp4_expand.dequantize(stored, block_scale, tensor_scale, k, dtype, assembly=False)
        assert torch.equal(wide, nvfp4.dequantize(stored, block_scale, tensor_scale, k, dtype)), (n, k, dtype)


def attention(batch: int, m: int, d: int, n: int, masked: bool, dtype: torch.dtype) -> None:
    """Weights, values and result are rounded to the dtype; scores and sums are fp32."""
    q, k, v = (torch.randn(batch, *size).to(dtype) for size in ((m, d), (n, d), (n, d)))
    keep = torch.rand(n) < 0.5 if masked else None
    given = [x[:, None] for x in (q, k, v)]
    y = decode_attention.attention(*given, None if keep is None else keep[None], d**-0.5, assembly=False)[:, 0].double()
    scores = (q.double() @ k.double().transpose(1, 2)) * d**-0.5
    weights = (scores if keep is None else scores.masked_fill(~keep, -torch.inf)).softmax(-1)
    expected, magnitudes = weights @ v.double(), weights @ v.double().abs()
    error = (y - expected).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * (magnitudes + expected.abs()) + 1e-5).all(), (batch, m, d, n)


def store(n: int, k: int, dtype: torch.dtype, more: float) -> None:
    """Equals plain torch's bit for bit, whatever a block holds; rows may lie apart."""
    weight = (torch.randn(n, k + 5) * torch.logspace(-6, 3, n)[:, None]).to(dtype)[:, :k]
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, torch.finfo(dtype).tiny, -1e-30, 6.0, 0.25]).to(
        dtype
    )
    weight[0, : min(k, 8)] = special[:k]
    weight[n // 2] = 0.0
    for amax in (None, nvfp4.amax_of(weight) * more):
        found = nvfp4_store.store(weight, amax)
        for one, other in zip(found, nvfp4.stored(weight, amax), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (one, other))), (
                n,
                k,
                dtype,
            )


def grouped_attention() -> None:
    """Queries of several heads share their keys, which lie as (B, N, KV heads, D); each batch has a mask. A query of NaN
    is not one that attends to no key."""
    q, k, v = (torch.randn(3, *size).bfloat16() for size in ((6, 2, 64), (2, 90, 64), (2, 90, 64)))
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    keep = torch.rand(3, 180)[:, ::2] < 0.5
    keep[1], q[0, 1] = False, torch.nan
    for programs in (1, 512):
        with mock.patch.object(decode_attention, "_PROGRAMS", programs):
            y = decode_attention.attention(q, k, v, keep, 0.1, zeros=True, assembly=False).double()
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), keep[:, None, None], scale=0.1, enable_gqa=True
        )
        near = (y - expected).abs() <= 2.0**-7 * expected.abs() + 2.0**-8
        assert torch.equal(y.isnan(), expected.isnan()) and (near | y.isnan()).all() and (y[1] == 0).all()
    nothing = decode_attention.attention(q, k[:, :, :0], v[:, :, :0], keep[:, :0], 0.1, zeros=True, assembly=False)
    assert (nothing == 0).all()


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    for config, sizes in LINEAR:
        linear(config, *sizes)
    every, scales = WHOLE in os.environ, ((True, True), (False, True))
    for number, (given, sizes) in enumerate(FP8):
        for of_rows in scales if every else scales[number % 2 :][:1]:
            fp8(small_m.SmallMConfig(*given), *sizes, of_rows)
    for given, sizes in (FP8[2], FP8[6]):
        fp8_special(small_m.SmallMConfig(*given), *sizes)
    weights = list(itertools.product((1, 11), (16, 50, 1040))) if every else [(1, 50), (11, 16), (11, 1040)]
    for n, k in weights:
        expand(n, k)
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for (n, k), dtype in itertools.product(weights, dtypes) if every else zip(weights, dtypes, strict=True):
        store(n, k, dtype, 1.5)
    attention(2, 4, 64, 200, True, torch.bfloat16)  # chunks that no block fills
    with mock.patch.object(decode_attention, "_PROGRAMS", 3):  # a chunk of several blocks
        attention(3, 1, 64, 130, False, torch.float16)
    nothing = torch.zeros(70, dtype=torch.bool)
    q, k = torch.randn(1, 8, 128).half(), torch.randn(1, 70, 128).half()
    hidden = [x[:, None] for x in (q, k, k)] + [nothing[None], 1.0]
    assert decode_attention.attention(*hidden, assembly=False).isnan().all()
    assert (decode_attention.attention(*hidden, zeros=True, assembly=False) == 0).all()
    grouped_attention()
