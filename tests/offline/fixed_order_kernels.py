"""Runs the kernel whose sums are made in one order in Triton's interpreter, and compares:

TRITON_INTERPRET=1 python -m tests.offline.fixed_order_kernels
"""

import torch

from te_inductor.kernels.fixed_order import FixedOrderConfig
from te_inductor.runtime.eager import fixed_order as eager
from te_inductor.templates.triton import fixed_order
from tests.offline.interpret import mend_conversions

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
CONFIG = FixedOrderConfig(16, 16, 128, 4, 1)
TILES = [CONFIG, FixedOrderConfig(64, 32, 128, 4, 2), FixedOrderConfig(128, 16, 256, 8, 3)]
# The batch, M, N, K, none of which fills a tile; the operands' dtype; the shapes of both scales.
CASES = [
    ((2, 21, 18, 40), BF16, None),
    ((1, 5, 33, 200), FP32, None),
    ((1, 21, 18, 400), FP8, ((21, 1), (18, 1))),
    ((1, 3, 18, 144), FP8, ((), (18, 1))),
    ((1, 17, 20, 384), FP8, ((3, 17), (3, 20))),
]


def check(sizes, dtype, shapes) -> None:
    """Products are exact in fp32, or rounded once, and K of them are summed there. A row is the same alone, as the
    last of several, and beside zeros behind K; what is not there is NaN in memory."""
    batch, m, n, k = sizes
    a, b = ((torch.randn(batch, rows, k) * 4).to(dtype) for rows in (m, n))
    scales = [None, None] if shapes is None else [torch.rand(shape) + 0.5 for shape in shapes]
    blocked = shapes is not None and shapes[0][:1] == (3,) and dtype is FP8 and k % 128 == 0
    y = fixed_order.multiply(a, b, *scales, blocked, FP32, CONFIG)
    expected = eager.fixed_mm(a, b, *scales, blocked, FP32)
    wide = eager.fixed_mm(a.float().abs(), b.float().abs(), *scales, blocked, FP32)
    assert ((y - expected).abs() <= (2 * k + 6) * 2.0**-24 * wide).all(), sizes
    for rows in (slice(0, 1), slice(m - 2, m)):
        of_a = scales[0]
        if of_a is not None and of_a.dim():
            of_a = of_a[:, rows] if blocked else of_a[rows]
        assert torch.equal(fixed_order.multiply(a[:, rows], b, of_a, scales[1], blocked, FP32, CONFIG), y[:, rows])
    if shapes is None:
        longer = [torch.cat([x, torch.zeros(batch, x.shape[1], 300).to(dtype)], 2) for x in (a, b)]
        assert torch.equal(fixed_order.multiply(*longer, None, None, False, FP32, CONFIG), y), sizes
        turned = b.mT.contiguous()
        assert torch.equal(fixed_order.multiply(a, turned, None, None, False, FP32, CONFIG, True), y), sizes
    narrow = fixed_order.multiply(a, b, *scales, blocked, BF16, CONFIG)
    assert torch.equal(narrow, y.bfloat16())


def check_tiles(n: int, k: int, dtype: torch.dtype, scaled: bool) -> None:
    """Sums of small integers are exact in any order, so that all tiles and numbers of rows have the oracle's bits. What is
    not finite stays in its row and column."""
    a, b = (torch.randint(-4, 5, (1, rows, k)).float() for rows in (128, n))
    for bad, place in ((torch.nan, 2), (torch.inf, 5)):
        a[0, place, k // 2], b[0, place, k - 1] = bad, bad
    a, b = a.to(dtype), b.to(dtype)
    scales = [torch.rand(rows, 1) + 0.5 for rows in (128, n)] if scaled else [None, None]
    expected = (a.double() @ b.double().mT).float()
    expected = expected * scales[0] * scales[1].t() if scaled else expected
    for rows in (1, 3, 16, 64, 128):
        of_a = scales[0][:rows] if scaled else None
        for config in TILES:
            y = fixed_order.multiply(a[:, :rows], b, of_a, scales[1], False, FP32, config)
            assert torch.equal(y.nan_to_num(1e30, 2e30, 3e30), expected[:, :rows].nan_to_num(1e30, 2e30, 3e30)), rows


if __name__ == "__main__":
    mend_conversions()
    torch.manual_seed(0)
    for case in CASES:
        check(*case)
    for given in ((37, 201, BF16, False), (18, 400, FP8, True), (7, 65, FP32, False)):
        check_tiles(*given)
