"""The NVFP4 kernels one warp of which loads, run as the Python they are written in: `tests.offline.gluon`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from te_inductor.kernels.nvfp4_fp8 import NVFP4PromptConfig  # noqa: E402
from te_inductor.kernels.nvfp4_linear import NVFP4Config, supports  # noqa: E402
from te_inductor.numerics import nvfp4  # noqa: E402
from te_inductor.templates.triton import nvfp4_decode, nvfp4_fp8, nvfp4_linear, nvfp4_streamed  # noqa: E402
from tests.offline.gluon import Array, Descriptor, Pointer, Program, Stuck, array, numpy_of  # noqa: E402
from tests.support.kernels import stored as problem  # noqa: E402

# What assembly makes, which tests/offline/test_nvfp4.py executes line by line.


def _bits(values: Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).view(torch.uint16).numpy().astype(np.uint32)


def _twice(values: Tensor) -> Array:
    """A bf16 in both halves of a register."""
    return array((_bits(values) * 0x10001).view(np.int32))


def _single(pairs: Array) -> Tensor:
    """Takes values out of pairs."""
    return torch.from_numpy((np.asarray(pairs).view(np.uint32) << 16).view(np.float32))


def scale(scales: Array) -> Array:
    return _twice(torch.from_numpy(np.asarray(scales).astype(np.uint8)).view(torch.float8_e4m3fn).float() * 2.0**119)


def scales(pairs: Array) -> tuple[Array, Array]:
    return scale(pairs & 0xFF), scale(pairs >> 8 & 0xFF)


def times(pairs: Array, powers: Array) -> Array:
    return _twice(_single(pairs) * _single(np.broadcast_to(powers, pairs.shape)))


def _decoded(units: np.ndarray, factor: Tensor) -> Tensor:  # (blocks, 2), (blocks,) -> (blocks, 16), times 2**-126
    stored = torch.from_numpy(np.ascontiguousarray(units).view(np.uint8)).reshape(-1, 8)
    one = torch.ones(len(stored), 1).to(torch.float8_e4m3fn)
    return nvfp4.values(stored, one) * (factor * 2.0**-126)[:, None]


def values(units: Array, pairs: Array) -> tuple[Array, ...]:  # (..., 2) both
    decoded = _decoded(units, _single(pairs).reshape(-1, 2)[:, 0]).view(-1, 4, 2, 2)  # block, i, unit, half
    words = (_bits(decoded[..., 0]) | _bits(decoded[..., 1]) << 16).view(np.int32)
    return tuple(array(words[:, i].reshape(units.shape)) for i in range(4))


def e4m3_values(low: Array, high: Array, pairs: Array) -> tuple[Array, ...]:
    decoded = _decoded(np.stack((low, high), -1), _single(pairs).reshape(-1)) * 2.0**7
    assert decoded.abs().max() <= 448
    words = decoded.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1, 4, 4).view(np.int32)
    return tuple(array(words[:, i].reshape(low.shape)) for i in range(4))


def larger(odd: Array, even: Array, words: Array) -> tuple[Array, Array]:
    words = np.asarray(words, np.int32)
    of_halves = (np.maximum(a.view(np.uint16), b.view(np.uint16)) for a, b in ((odd, words), (even, words << 8)))
    return tuple(array(halves.view(np.int32)) for halves in of_halves)


ASSEMBLY = {
    nvfp4_decode.SCALE.value: scale,
    nvfp4_decode.SCALES.value: scales,
    nvfp4_decode.TIMES.value: times,
    nvfp4_decode.VALUES.value: values,
    nvfp4_decode.E4M3_VALUES.value: e4m3_values,
    nvfp4_fp8._LARGER.value: larger,
}


def weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, block_scale, tensor_scale = nvfp4.quantize(torch.randn(n, k))
    return nvfp4.store(codes), block_scale, tensor_scale


def pointer(tensor: Tensor) -> Pointer:
    return Pointer(numpy_of(tensor).reshape(-1))


def streamed(config: NVFP4Config, m: int, n: int, k: int, late: Callable[[float], float] | None = None) -> None:
    """Every program of the kernel for few rows: products are exact, sums in fp32."""
    torch.manual_seed(0)
    stored, block_scale, tensor_scale = weight(n, k)
    x = torch.randn(m, k).to(torch.bfloat16)
    shape = config.rows, config.block_n, config.shares, config.stages
    given = nvfp4_linear.arranged(x, config), stored.view(torch.int32), block_scale.view(torch.int16)
    boxes = (box.shape for box in nvfp4_streamed.boxes(*shape[:2]))
    y = np.full((config.splits, m, n), np.nan, np.float32)
    args: tuple[Any, ...] = (
        *map(Descriptor, given, boxes), pointer(tensor_scale), Pointer(y.reshape(-1)), m, n, config.splits,
        k // (config.block_k * config.splits),
    )  # fmt: skip
    for program in range(-(-m // config.rows) * config.splits * -(-n // config.block_n)):
        Program(program, ASSEMBLY, late).run(nvfp4_streamed._linear, *args, **nvfp4_streamed.constants(*shape))
    wide = nvfp4.values(stored, block_scale).double() * tensor_scale.double()
    expected, magnitudes = x.double() @ wide.t(), x.double().abs() @ wide.abs().t()
    error = (torch.from_numpy(y).double().sum(0) - expected).abs()
    assert (error <= magnitudes * k * 2.0**-24).all()


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((8, 128, 256, 1, 8, 1, 2), (3, 70, 1536)),
        ((16, 64, 256, 2, 8, 2, 4), (21, 130, 5120)),
        ((16, 64, 256, 1, 8, 2, 6), (16, 64, 512)),
        ((8, 64, 256, 1, 16, 4, 8), (8, 65, 4096)),
        ((16, 256, 256, 2, 16, 1, 3), (9, 300, 2560)),
        ((32, 128, 256, 1, 16, 2, 4), (32, 128, 2048)),
        ((64, 128, 256, 1, 8, 1, 3), (64, 128, 1280)),
    ],
    ids=str,
)
def test_few_rows(given, sizes):
    """Rows, columns and parts of K that fill no program or several, more turns than stages and fewer, and copies in any
    order."""
    config = NVFP4Config("streamed", *given)
    assert supports(config, problem(*sizes, torch.bfloat16)) is None
    streamed(config, *sizes)


@pytest.mark.parametrize(("shares", "stages"), [(2, 3), (2, 2), (4, 4)])
def test_what_is_refused_goes_wrong(shares, stages):
    """Stages that are no multiple of the parts, where one part's copies are late, and as many as there are parts."""
    config = NVFP4Config("streamed", 8, 64, 256, 1, 8 if shares == 2 else 16, shares, stages)
    assert supports(config, problem(8, 64, 4096, torch.bfloat16)) is not None
    with pytest.raises((Stuck, AssertionError)):
        streamed(config, 8, 64, 4096, late=lambda place: math.inf if int(place * 16) % shares == 1 else 0.0)


@pytest.mark.parametrize(
    ("rows", "splits", "sizes"),
    [(128, 1, (131, 70, 768)), (192, 2, (190, 128, 2048)), (256, 1, (200, 130, 1536)), (128, 3, (70, 130, 1280))],
    ids=str,
)
def test_prompts(rows, splits, sizes):
    """Every program of the kernel that decodes to E4M3: the values of `nvfp4.recast`, but where a part of K has a power
    of its own, with a scale for each row of x and of the weight."""
    torch.manual_seed(0)
    m, n, k = sizes
    parts = weight(n, k)
    x, x_scale = torch.randn(m, k).to(torch.float8_e4m3fn), torch.rand(m, 1) + 0.5
    config = NVFP4PromptConfig(rows, splits)
    given = nvfp4_fp8.arranged(x), parts[0].view(torch.int32), parts[1].view(torch.uint8)
    boxes = (box.shape for box in nvfp4_fp8.boxes(rows))
    y = np.full((splits, m, n), np.nan, np.float32)
    args: tuple[Any, ...] = (
        *map(Descriptor, given, boxes), pointer(x_scale), pointer(given[2].view(torch.int32)), pointer(parts[2]),
        Pointer(y.reshape(-1)), m,
    )  # fmt: skip
    for program in range(-(-m // rows) * splits * -(-n // nvfp4_fp8.BLOCK_N.value)):
        Program(program, ASSEMBLY).run(nvfp4_fp8._linear, *args, **nvfp4_fp8.constants(n, k, config))
    data, scale_inv = nvfp4.recast(*parts)
    factor = scale_inv.double().t() * x_scale.double()
    expected = (x.double() @ data.double().t()) * factor
    magnitudes = (x.double().abs() @ data.double().abs().t()) * factor
    error = (torch.from_numpy(y).double().sum(0) - expected).abs()
    assert (error <= magnitudes * (k * 2.0**-24 if splits == 1 else 2.0**-10)).all()
