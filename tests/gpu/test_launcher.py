"""A launcher's kernels on a GPU: the first call, which Triton makes, and those behind it."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from te_inductor.templates.triton.launcher import Launcher

pytestmark = pytest.mark.gpu


@triton.jit
def _sums(x, y, out, size, stride, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place.to(tl.int64) * stride, mask=place < size, other=0).to(tl.float32)
    if y is not None:
        value += tl.load(y + place, mask=place < size, other=0).to(tl.float32)
    tl.store(out + place, value * factor * (2 if TWICE else 1), mask=place < size)


def called(launch, x, y, size, stride, factor):
    out = torch.full((size,), torch.nan, device=x.device)
    launch(triton.cdiv(size, 128), x, y, out, size, stride, factor)
    return out


@pytest.mark.parametrize("twice", [False, True])
def test_every_kind_of_argument_twice(twice):
    launch, memory = Launcher(_sums, BLOCK=128, TWICE=twice, num_warps=4), torch.randn(1 << 14, device="cuda")
    kinds = itertools.product((0, 1, 4), (torch.float32, torch.bfloat16), (True, False), (1, 16, 17, 1000), (1, 2, 16))
    for (offset, dtype, added, size, stride), again in itertools.product(list(kinds), range(2)):
        x = memory.to(dtype)[offset:]
        y = memory.flip(0).to(dtype)[offset:] if added else None
        expected = x[::stride][:size].float()
        expected = (expected if y is None else expected + y[:size].float()) * 0.5 * (2 if twice else 1)
        assert torch.equal(called(launch, x, y, size, stride, 0.5), expected), (
            offset,
            dtype,
            added,
            size,
            stride,
            again,
        )
    assert len(launch._compiled) > 20


def test_a_recorded_graph_and_another_stream():
    launch, x = Launcher(_sums, BLOCK=128, TWICE=False, num_warps=4), torch.randn(1000, device="cuda")
    expected = called(launch, x, x, 1000, 1, 1.0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        recorded = called(launch, x, x, 1000, 1, 1.0)
    x.mul_(3)
    graph.replay()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = called(launch, x, x, 1000, 1, 1.0)
    stream.synchronize()
    assert torch.equal(recorded, aside) and torch.allclose(recorded, 3 * expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_the_device_of_the_first_argument():
    launch = Launcher(_sums, BLOCK=128, TWICE=False, num_warps=4)
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(1000, device=device)
        assert torch.equal(called(launch, x, None, 1000, 1, 1.0), x)
    assert torch.cuda.current_device() == 0
