"""Stored NVFP4 weights against the oracle: the cast bit for bit, the order of a block, and products with it."""

import math

import pytest
import torch

from te_inductor import targets
from te_inductor.kernels import cublaslt, nvfp4_fp8, nvfp4_linear, plain
from te_inductor.kernels.problem import Sizes
from te_inductor.kernels.select import select
from te_inductor.numerics import microscaling, nvfp4
from te_inductor.ops import stored as ops_stored
from te_inductor.recipes.formats import E4M3
from tests.bounds import assert_same_values
from tests.oracle import nvfp4 as oracle
from tests.oracle.casts import round_to_element
from tests.support.contents import CONTENTS
from tests.support.kernels import pretend

FINITE = {
    name: make
    for name, make in CONTENTS.items()
    if name in ("random", "wide", "zeros", "one zero", "subnormal", "huge")
}
SIZES = [(1, 1), (3, 17), (33, 80), (40, 256)]


def stored(weight):
    codes, block_scale, tensor_scale = nvfp4.quantize(weight)
    return nvfp4.store(codes), block_scale, tensor_scale


@pytest.mark.sample(1)
@pytest.mark.parametrize("contents", FINITE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast(contents, size, dtype):
    """Codes, block scales and the tensor's scale; K padded with zeros to whole blocks."""
    weight = FINITE[contents](*size).to(dtype)
    codes, block_scale, tensor_scale = nvfp4.quantize(weight)
    data, scales, scale = oracle.quantize(weight)
    assert_same_values(block_scale, scales)
    assert tensor_scale.item() == scale and tensor_scale.dtype == torch.float32
    padded = torch.zeros(size[0], scales.shape[1] * 16, dtype=torch.float64)
    padded[:, : size[1]] = data
    assert torch.equal(microscaling.pack(codes), oracle.pack(padded))


def test_what_is_not_finite():
    """A NaN or an infinity makes its block's scale NaN, and no other's."""
    weight = torch.randn(2, 48)
    weight[0, 3], weight[1, 20] = math.nan, math.inf
    codes, block_scale, tensor_scale = nvfp4.quantize(weight)
    data, scales, scale = oracle.quantize(weight)
    assert_same_values(block_scale, scales)
    assert tensor_scale.item() == scale and scales.isnan().tolist() == [[True, False, False], [False, True, False]]
    assert_same_values(nvfp4.values(nvfp4.store(codes), block_scale), oracle.dequantize(data, scales, 1.0))


def test_order_of_a_stored_block():
    """The order is as the note states it, value by value: the bits of value (i, h) of unit u, found where bf16 has its
    own."""
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    units = nvfp4.store(codes).view(torch.int32).long() & 0xFFFFFFFF
    for turns in nvfp4._TURNS:
        assert sum(bin(mask).count("1") for _, mask in turns) == 8
    for block in range(4):
        for i, turns in enumerate(nvfp4._TURNS):
            for unit in range(2):
                for h in range(2):
                    word = units[:, 2 * block + unit]
                    field = sum(((word << turn) | (word >> (32 - turn))) & mask for turn, mask in turns)
                    bits = (field >> (16 * h)) & 0xFFFF
                    code = codes[:, 16 * block + 4 * i + 2 * unit + h].long()
                    assert torch.equal(bits, ((code & 8) << 12) | ((code & 7) << 6))
    assert torch.equal(nvfp4.codes(nvfp4.store(codes)), codes)
    assert torch.equal(nvfp4.unpack(microscaling.pack(codes)), codes)
    assert torch.equal(nvfp4.repack(microscaling.pack(codes)), nvfp4.store(codes))


@pytest.mark.parametrize("size", SIZES)
def test_values_are_exact_in_bf16(size):
    weight = torch.randn(size) * torch.exp2(torch.randint(-8, 8, size))
    parts = stored(weight)
    data, scales, scale = oracle.quantize(weight)
    values = nvfp4.values(*parts[:2])
    assert torch.equal(values, values.bfloat16().float())
    assert_same_values(values[:, : size[1]], oracle.dequantize(data, scales, 1.0))
    expected = oracle.dequantize(data, scales, scale)
    assert_same_values(nvfp4.dequantize(*parts, size[1], torch.float32), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_linear(size, dtype):
    """Products of a value and an activation are exact in fp32 for bf16 (14 significant bits); K of them are summed,
    then the tensor's scale and the output round."""
    weight, x = torch.randn(size), torch.randn(7, size[1]).to(dtype)
    y = ops_stored.nvfp4_linear(x, *stored(weight), dtype)
    wide = oracle.dequantize(*oracle.quantize(weight))
    error = (y.double() - x.double() @ wide.t()).abs()
    magnitudes = x.double().abs() @ wide.abs().t()
    assert y.dtype == dtype
    assert (error <= magnitudes * ((size[1] + 3) * 2.0**-24 + torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("size", SIZES)
def test_recast(size):
    """Each stored value times a power of two, rounded once to E4M3; no row's largest value saturates or loses a factor
    of two."""
    weight = torch.randn(size) * torch.exp2(torch.randint(-8, 8, (size[0], 1)))
    if size[0] > 3:
        weight[2] = 0.0
    parts = stored(weight)
    data, scale_inv = nvfp4.recast(*parts)
    exact = nvfp4.values(*parts[:2]).double()
    factor = (parts[2].double() / scale_inv.double()).float().double()
    mantissa, _ = torch.frexp(factor)
    assert (mantissa == 0.5).all() and scale_inv.shape == (size[0], 1)
    assert_same_values(data, round_to_element(exact * factor, E4M3))
    largest = 6.0 * parts[1].double().amax(1, keepdim=True) * factor
    assert (((largest > 224.0) & (largest <= 448.0)) | (largest == 0.0)).all()


def test_linear_fp8():
    """Both in E4M3: products of 4 significant bits each are exact in fp32, and so, up to rounding, is their sum."""
    weight, x = torch.randn(33, 256), torch.randn(70, 256).to(E4M3.dtype)
    x_scale = torch.rand(70, 1) + 0.5
    parts = stored(weight)
    y = ops_stored.nvfp4_linear_fp8(x, x_scale, *parts, torch.float32)
    data, scale_inv = nvfp4.recast(*parts)
    scales = x_scale.double() * scale_inv.double().t()
    error = (y.double() - (x.double() @ data.double().t()) * scales).abs()
    assert (error <= (x.double().abs() @ data.double().abs().t()) * scales * 259 * 2.0**-24).all()


@pytest.mark.parametrize(
    ("capability", "prefill", "k", "ways"),
    [
        ((9, 0), "fp8", 4096, ("stored", "decoded", "decoded", "recast")),
        ((9, 0), "fp8", 4096 + 16, ("stored", "stored", "recast", "recast")),
        ((9, 0), "exact", 4096, ("stored", "stored", "exact", "exact")),
        ((10, 0), "fp8", 4096, ("stored", "stored", "recast", "recast")),
        ((8, 0), "fp8", 4096, ("stored", "stored", "exact", "exact")),
    ],
)
def test_how_rows_are_multiplied(monkeypatch, capability, prefill, k, ways):
    pretend(monkeypatch, capability)
    target, casts = targets.of(torch.device("cuda")), prefill == "fp8"
    stored = nvfp4_linear.FAMILY if capability >= (9, 0) and k % 64 == 0 else plain.EAGER  # of the same op
    families = {
        "stored": stored, "decoded": nvfp4_fp8.FAMILY, "recast": cublaslt.RECAST, "exact": cublaslt.WRITTEN_OUT
    }  # fmt: skip
    for m, way in zip((64, 65, 512, 513), ways, strict=True):
        asked = nvfp4_linear.problem(target, Sizes(m, 4096, k), torch.bfloat16, torch.bfloat16, casts)
        assert select(asked).family is families[way]
    asked = nvfp4_linear.problem(target, Sizes(1, 4096, k), torch.float32, torch.float32, casts)
    assert select(asked).family is cublaslt.WRITTEN_OUT
