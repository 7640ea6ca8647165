"""A launcher takes another kernel wherever Triton would: what it looks at is never less than what Triton looks at."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from te_inductor.templates.triton import launcher  # noqa: E402

INTEGERS = [0, 1, 2, 15, 16, 17, 48, -1, -16]
INTEGERS += [sign * 2**power + add for power in (31, 32, 63) for sign in (1, -1) for add in (-16, -1, 0, 1, 16)]
INTEGERS = [value for value in INTEGERS if -(2**63) <= value < 2**64]


def tensors():
    bytes_ = torch.zeros(4096, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32):
        for offset in (0, 8, 16, 4):
            yield bytes_[offset : offset + 1024].view(dtype)
    yield torch.zeros(0)
    yield torch.nn.Parameter(torch.zeros(16))


def descriptors():
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    boxes = [launcher.Box([rows, 128], layout) for rows in (64, 128)]
    for box, dtype, height in itertools.product(boxes, (torch.float8_e4m3fn, torch.uint8), (256, 4096)):
        yield launcher.Described(torch.zeros(height, 256, dtype=dtype), box)


def by_triton(value):
    """The type, and what else of the value is compiled in."""
    value = value.descriptor() if isinstance(value, launcher.Described) else value
    return native_specialize_impl(CUDABackend, value, False, True, True)


def test_what_is_looked_at():
    values = [*INTEGERS, *tensors(), *descriptors(), None, 0.5, 1.0]
    found = [(tuple(launcher.specialized([value])[0]), by_triton(value)) for value in values]
    for (ours, theirs), (our_other, their_other) in itertools.combinations(found, 2):
        assert ours != our_other or theirs == their_other, (ours, theirs, their_other)
    assert len({ours for ours, _ in found}) < len(values) / 2  # and few kernels serve many values


def test_one_launcher_for_the_same_constants():
    @triton.jit
    def kernel(x, SIZE: gl.constexpr):
        pass

    one = launcher.launcher(kernel, SIZE=1, num_warps=4)
    assert one is launcher.launcher(kernel, SIZE=1, num_warps=4)
    assert one is not launcher.launcher(kernel, SIZE=2, num_warps=4)
    assert one is not launcher.launcher(kernel, SIZE=1, num_warps=8)
    assert one.constants == {"SIZE": 1}


def test_constants_are_named():
    """One by position would be taken for an integer, whose value decides nothing."""

    @triton.jit
    def kernel(x, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
        pass

    with pytest.raises(TypeError, match="SPLITS"):
        launcher.Launcher(kernel, BLOCK=1)
