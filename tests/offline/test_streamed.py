"""The kernel for few rows by a stored NVFP4 weight, run as the Python it is written in: `tests.offline.gluon`."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from te_inductor.runtime import nvfp4
from te_inductor.templates.triton import nvfp4_decode, nvfp4_linear, nvfp4_streamed
from te_inductor.templates.triton.nvfp4_linear import Config, Problem, supports
from tests.offline.gluon import Array, Descriptor, Pointer, Program, Stuck, array, numpy_of


def pairs_of_scales(pairs: Array) -> tuple[Array, Array]:
    """What SCALES makes: two E4M3 bytes, each times 2**119 as two bf16."""
    return tuple(
        _twice(torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).float() * 2.0**119)
        for byte in (np.asarray(pairs) & 0xFF, np.asarray(pairs) >> 8 & 0xFF)
    )


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).view(torch.uint16).numpy().astype(np.uint32)


def _twice(values: torch.Tensor) -> Array:
    return array((_bits(values) * 0x10001).view(np.int32))


def four_words(units: Array, scales: Array) -> tuple[Array, ...]:
    """What VALUES makes of (..., 2) units, a block's, and its scale twice: times 2**-126."""
    stored = torch.from_numpy(np.ascontiguousarray(units).view(np.uint8)).reshape(-1, 8)
    one = torch.ones(len(stored), 1).to(torch.float8_e4m3fn)
    factor = np.asarray(scales).view(np.uint32).reshape(-1, 2)[:, 0] << 16
    values = nvfp4.values(stored, one) * (torch.from_numpy(factor.view(np.float32)) * 2.0**-126)[:, None]
    low, high = (_bits(values.view(-1, 4, 2, 2)[..., half]) for half in range(2))  # block, i, unit
    words = (low | high << 16).view(np.int32)
    return tuple(array(words[:, i].reshape(units.shape)) for i in range(4))


ASSEMBLY = {nvfp4_decode.SCALES.value: pairs_of_scales, nvfp4_decode.VALUES.value: four_words}


def run(config: Config, m: int, n: int, k: int, seed: int) -> None:
    """Every program of the kernel, against float64."""
    torch.manual_seed(seed)
    codes, block_scale, tensor_scale = nvfp4.quantize(torch.randn(n, k))
    stored = nvfp4.store(codes)
    x = torch.randn(m, k).to(torch.bfloat16)
    given = nvfp4_linear.arranged(x, config), stored.view(torch.int32), block_scale.view(torch.int16)
    shape = config.rows, config.block_n, config.shares, config.stages
    boxes = [box for box, _ in nvfp4_streamed.boxes(*shape[:2])]
    descriptors = [Descriptor(numpy_of(tensor), box) for tensor, box in zip(given, boxes, strict=True)]
    y = np.full((config.splits, m, n), np.nan, np.float32)
    turns = k // (config.block_k * config.splits)
    for program in range(-(-m // config.rows) * config.splits * -(-n // config.block_n)):
        Program(seed + program, program, ASSEMBLY).run(
            nvfp4_streamed._linear, *descriptors, Pointer(np.float32([tensor_scale])), Pointer(y.reshape(-1)), m, n,
            config.splits, turns, **nvfp4_streamed.constants(*shape),
        )  # fmt: skip
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
def test_every_program(given, sizes):
    """Rows, columns and parts of K that fill no program or several, more turns than stages and fewer, and copies in any
    order."""
    config = Config("streamed", *given)
    assert supports(config, Problem(*sizes, torch.bfloat16)) is None
    run(config, *sizes, seed=0)


@pytest.mark.parametrize(("shares", "stages"), [(2, 3), (2, 2), (4, 4)])
def test_what_is_refused_goes_wrong(shares, stages):
    """Stages that are no multiple of the parts, and as many as there are parts."""
    config = Config("streamed", 8, 64, 256, 1, 8 if shares == 2 else 16, shares, stages)
    assert supports(config, Problem(8, 64, 8192, torch.bfloat16)) is not None
    with pytest.raises((Stuck, AssertionError)):
        for seed in range(20):
            run(config, 8, 64, 8192, seed)
