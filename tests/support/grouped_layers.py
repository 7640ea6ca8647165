"""Layers of experts against the float64 oracle."""

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops import places_of
from tests.bounds import UNIT, assert_within, gemm_error, sum_error
from tests.oracle import casts, grouped
from tests.support.oracle_layers import SEEDS


def ends_of(sizes) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def check(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    sizes,
    slots,
    ys: list[Tensor],
    dy: Tensor,
    rows: Tensor | None = None,
    scales: tuple[float, float, float] | None = None,
) -> None:
    """What a layer gave, and the gradients that its inputs hold, against the oracle."""
    dtype, each = ys[0].dtype, 1 if rows is None else len(rows) // len(x)
    plain = [w.detach() for w in weights]
    pairs = grouped.operands(x.detach(), plain, dy, sizes, slots, rows, SEEDS, scales)
    bias = torch.cat([b.detach() for b in biases], 1) if biases else None
    y, dx = torch.cat(ys, 1).detach(), torch.zeros(len(dy), x.shape[1], dtype=torch.float64)
    error = torch.zeros_like(dx)
    dw = torch.cat([w.grad for w in weights], 1)
    db = torch.cat([b.grad for b in biases], 1) if biases else None
    for group, (begin, end) in enumerate(grouped.spans(sizes)):
        own = None if bias is None else bias[group]
        for what, (a, b), gemm, found in (
            ("y", pairs.fprop[group], slots.fprop, y[begin:end]),
            ("dw", pairs.wgrad[group], slots.wgrad, dw[group]),
        ):
            added = own if what == "y" else None
            if found.numel():
                expected = casts.product(a, b, added, gemm)
                assert_near(found, expected, error_of(a, b, added, dtype, gemm), f"{what} of group {group}")
        a, b = pairs.dgrad[group]
        dx[begin:end] = casts.product(a, b, None, slots.dgrad)
        error[begin:end] = error_of(a, b, None, dtype, slots.dgrad)
        if db is not None:
            own_dy = dy[begin:end]
            assert_near(db[group], own_dy.double().sum(0), sum_error(own_dy, dtype), f"db of group {group}")
    assert not y[sum(sizes) :].any(), "rows that belong to nobody"
    if rows is not None:  # the sum over a row's copies, in fp32
        total, bound, size = (torch.zeros(len(x), x.shape[1], dtype=torch.float64) for _ in range(3))
        for part, whole in ((total, dx), (bound, error), (size, dx.abs() + error)):
            part.index_add_(0, rows, whole)
        error = bound + (each - 1) * UNIT[torch.float32] * size
        dx, error = total, error + UNIT[x.dtype] * (total.abs() + error)
    assert_near(x.grad, dx, error, "dx")


def error_of(a, b, bias, dtype, gemm) -> Tensor:
    return gemm_error(a.data, a.scale_inv, b.data, b.scale_inv, bias, dtype, gemm, casts.alpha(a, b, gemm))


def assert_near(found: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Checks that values are within the bound; what is not finite is so in both."""
    assert torch.equal(found.isfinite(), expected.isfinite()), f"{what}: not finite elsewhere"
    finite = expected.isfinite()
    if finite.any():
        assert_within(found[finite], expected[finite], error[finite], what)


def inputs(sizes, behind=0, n=(45,), k=40, dtype=torch.float32, bias=True, each=0):
    """x, weights, biases, dy, and the gather's order where each row has `each` copies."""
    experts, rows = len(sizes), sum(sizes) + behind
    tokens = rows if not each else rows // each
    x = torch.randn(tokens, k).to(dtype).requires_grad_()
    # Experts of different ranges.
    ranges = 4.0 ** torch.arange(experts).remainder(3)[:, None, None]
    weights = [(torch.randn(experts, size, k) / k**0.5 * ranges).to(dtype).requires_grad_() for size in n]
    biases = [torch.randn(experts, size).to(dtype).requires_grad_() for size in n] if bias else []
    order = torch.randperm(rows) if each else None
    return x, weights, biases, torch.randn(rows, sum(n)).to(dtype), order


def run(layer, x, weights, biases, ends, slots, order, each, dy, dtype):
    more = {"rows": order // each, "places": places_of(order, each)} if each else {}
    given = x if each else ops.mask_rows(x, ends)
    ys = layer(given, weights, biases, ends, slots, dtype, **more)
    torch.autograd.backward(ys, list(dy.split([y.shape[1] for y in ys], 1)))
    return ys
