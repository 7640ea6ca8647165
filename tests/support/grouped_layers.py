"""Layers of experts against the float64 oracle."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops import places_of
from tests.bounds import UNIT, assert_within, gemm_error, sum_error
from tests.oracle import casts, grouped
from tests.support.oracle_layers import SEEDS


def ends_of(sizes) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


class Found(NamedTuple):
    """What a layer gave, of all weights as one."""

    y: Tensor  # (M, N)
    dx: Tensor  # (T, K)
    dw: Tensor  # (E, N, K)
    db: Tensor | None  # (E, N)


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
    pairs = grouped.operands(x.detach(), [w.detach() for w in weights], dy, sizes, slots, rows, SEEDS, scales)
    bias, db = (torch.cat([part(b) for b in biases], 1) if biases else None for part in (Tensor.detach, _gradient))
    found = Found(torch.cat(ys, 1).detach(), x.grad, torch.cat([w.grad for w in weights], 1), db)
    compare(pairs, found, bias, sizes, slots, dy, rows)


def _gradient(tensor: Tensor) -> Tensor:
    return tensor.grad


def compare(
    pairs: grouped.Operands,
    found: Found,
    bias: Tensor | None,  # (E, N)
    sizes,
    slots,
    dy: Tensor,
    rows: Tensor | None = None,  # of x, that are multiplied
    total: float = 0.0,  # to which gradients of `made` were added in fp32, of which dw is the rest
    made: torch.dtype | None = None,
) -> None:
    """Each group's products against the oracle's, of these operands; and rows of nobody, which are zeros."""
    y, db, dtype = found.y, found.db, found.y.dtype
    dx = torch.zeros(len(dy), found.dx.shape[1], dtype=torch.float64)
    error = torch.zeros_like(dx)
    for group, (begin, end) in enumerate(grouped.spans(sizes)):
        own = None if bias is None else bias[group]
        (a, b), part = pairs.fprop[group], y[begin:end]
        if part.numel():
            assert_near(
                part, casts.product(a, b, own, slots.fprop), error_of(a, b, own, dtype, slots.fprop), f"y of {group}"
            )
        (a, b), part = pairs.wgrad[group], found.dw[group]
        expected = casts.product(a, b, None, slots.wgrad)
        rounded = 2 * UNIT[torch.float32] * (expected.abs() + total) if total else 0.0
        assert_near(part, expected, error_of(a, b, None, made or part.dtype, slots.wgrad) + rounded, f"dw of {group}")
        a, b = pairs.dgrad[group]
        dx[begin:end] = casts.product(a, b, None, slots.dgrad)
        error[begin:end] = error_of(a, b, None, dtype, slots.dgrad)
        if db is not None:
            own_dy = dy[begin:end]
            assert_near(db[group], own_dy.double().sum(0), sum_error(own_dy, dtype), f"db of {group}")
    assert not y[sum(sizes) :].any(), "rows that belong to nobody"
    if rows is not None:  # the sum over a row's copies, in fp32
        sums, bound, size = (torch.zeros(found.dx.shape, dtype=torch.float64) for _ in range(3))
        for whole, of_copies in ((sums, dx), (bound, error), (size, dx.abs() + error)):
            whole.index_add_(0, rows, of_copies)
        error = bound + (len(rows) // len(found.dx) - 1) * UNIT[torch.float32] * size
        dx, error = sums, error + UNIT[found.dx.dtype] * (sums.abs() + error)
    assert_near(found.dx, dx, error, "dx")


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
