"""Experts in MXFP8 by torch's library on Blackwell, without one: the order of scales by its definition, element by
element, and a layer with a stand-in for the product, which reads scales as the library does and so computes what
emulated GEMMs do, bit for bit. torch's own checks of sizes and strides run on all that it is given."""

import pytest
import torch
from torch import Tensor

from te_inductor import ops, targets
from te_inductor.recipes import Gemm, MXFP8BlockScaling
from te_inductor.runtime import grouped, grouped_library
from te_inductor.runtime.microscaling import e8m0_value
from te_inductor.targets import sm100

SIZES = {"many": (0, 1, 17, 130, 0, 128), "rows behind": (40, 0, 3), "one has all": (0, 90, 0)}  # even in all
BEHIND = {SIZES["rows behind"]: 21}


def place(row: Tensor, block: Tensor, blocks: int) -> Tensor:
    """Where cuBLAS's documentation has the scale of a row and a block of a matrix with so many blocks a row."""
    across = -(-blocks // 4)
    return (row // 128 * across + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def read(stored: Tensor, base: int, rows: int, blocks: int) -> Tensor:
    """Values of a matrix of scales that begins there."""
    index = place(torch.arange(rows)[:, None], torch.arange(blocks)[None, :], blocks)
    return e8m0_value(stored.view(torch.uint8).flatten()[base + index])


def up(size: int, to: int) -> int:
    return -(-size // to) * to


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_grouped_mm`; what it leaves unwritten is NaN."""
    shapes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, a_scale, b_scale)]
    out = torch.ops.aten._scaled_grouped_mm(*shapes, offs.to("meta"), out_dtype=out_dtype)
    y, begin, base = torch.full(out.shape, torch.nan), 0, [0, 0]
    for group, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            blocks, rows = a.shape[1] // 32, end - begin
            left = read(a_scale, base[0], rows, blocks)
            right = read(b_scale[group], 0, b.shape[2], blocks)
            base[0] += up(rows, 128) * up(blocks, 4)
            pair = a[begin:end].float(), b[group].t().float()
        else:
            assert end > begin, "an empty group, whose gradient nobody writes"
            blocks = (end - begin) // 32
            left, right = (read(*x, blocks) for x in ((a_scale, base[0], a.shape[0]), (b_scale, base[1], b.shape[1])))
            base[0] += up(a.shape[0], 128) * up(blocks, 4)
            base[1] += up(b.shape[1], 128) * up(blocks, 4)
            pair = a[:, begin:end].float(), b.t()[:, begin:end].float()
        wide = [x * scale.repeat_interleave(32, 1) for x, scale in zip(pair, (left, right), strict=True)]
        where = y[begin:end] if b.dim() == 3 else y[group]
        torch.mm(wide[0], wide[1].t(), out=where)
        begin = end
    return y.to(out_dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("squares", [False, True])
def test_layer(sizes, squares, monkeypatch):
    """Output and gradients of what emulation computes, also of experts without rows; rows that are gathered, a bias."""
    slots = MXFP8BlockScaling(enable_2d_quantization=squares).slots()
    ends = torch.tensor(sizes).cumsum(0).int()
    rows = int(ends[-1]) + BEHIND.get(sizes, 0)
    order = torch.randperm(rows)
    x = torch.randn(rows // 2, 80).bfloat16().requires_grad_()
    w = torch.randn(len(sizes), 48, 80).bfloat16().requires_grad_()
    bias = torch.randn(len(sizes), 48).bfloat16().requires_grad_()
    dy = torch.randn(rows, 48).bfloat16()

    def layer() -> list[Tensor]:
        given = x, [w], [bias], ends, slots, torch.bfloat16, order // 2, ops.places_of(order, 2)
        [y] = ops.trace_grouped_linears(*given)
        return [y, *torch.autograd.grad(y, (x, w, bias), dy)]

    expected = layer()
    monkeypatch.setattr(grouped_library, "multiplies", lambda *args: True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    for found, emulated in zip(layer(), expected, strict=True):
        assert found.dtype == emulated.dtype and torch.equal(found, emulated)


def test_where(monkeypatch):
    """On compute capability 10.0 alone, of bf16 and E4M3, where torch was built with the library."""
    gemm, bf16 = MXFP8BlockScaling().slots().fprop, torch.bfloat16
    assert not grouped_library.multiplies(torch.device("cpu"), gemm, bf16)
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=ON")
    assert sm100.target((10, 0), "13.0").grouped_microscaled_mm
    assert not sm100.target((10, 3), "13.0").grouped_microscaled_mm
    assert not sm100.target((10, 0), "12.6").grouped_microscaled_mm
    monkeypatch.setattr(targets, "of", lambda device: sm100.target((10, 0), "13.0"))
    device = torch.device("cuda")
    assert grouped_library.multiplies(device, gemm, bf16, bf16)
    assert not grouped_library.multiplies(device, gemm, bf16, torch.float32)
    assert not grouped_library.multiplies(device, Gemm("fprop"), bf16)
    assert not grouped_library.multiplies(device, Gemm("dgrad", False, ("1x32", "1x32"), ("e5m2", "e4m3")), bf16)
    assert not grouped_library.multiplies(device, Gemm("fprop", False, ("1x16", "1x16"), ("e2m1", "e2m1")), bf16)
    monkeypatch.setattr(torch.__config__, "show", lambda: "")
    assert not sm100.target((10, 0), "13.0").grouped_microscaled_mm


def test_groups_have_room():
    """For a tile of each empty group, whatever the others are."""
    for sizes in ((0,) * 5, (1,) * 5, (129, 0, 0, 0, 0), (640, 0, 1, 0, 127)):
        ends = torch.tensor(sizes).cumsum(0).int()
        starts, tiles, source = grouped.layout(ends, sum(sizes), grouped.GROUP_ALIGNMENT)
        assert starts.diff().ge(128).all() and starts[-1] <= len(source) == 128 * len(tiles)
        assert (source >= 0).sum() == sum(sizes)
