"""Runs the kernel whose sums are made in one order in Triton's interpreter, and compares:

TRITON_INTERPRET=1 python -m tests.offline.fixed_order_kernels
"""

import torch

from te_inductor.kernels.fixed_order import FixedOrderConfig
from te_inductor.runtime.eager import fixed_order as eager
from te_inductor.templates.triton import fixed_order
from tests.offline.interpret import mend_conversions

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
CONFIG = FixedOrderConfig(16, 128, rows=16, stages=1)
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


if __name__ == "__main__":
    mend_conversions()
    torch.manual_seed(0)
    for case in CASES:
        check(*case)
