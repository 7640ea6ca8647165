"""Grouped FP8 GEMMs and what they are held to: each group by itself, in float64, within the bounds of one GEMM."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ELEMENTS, SCOPES
from tests import bounds
from tests.oracle import casts

BLOCK = 128


@dataclass(frozen=True)
class Products:
    """The arguments of `grouped_mm`, on the CPU."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    ends: Tensor
    bias: Tensor | None

    def on(self, device: str) -> tuple[Any, ...]:
        return tuple(None if value is None else value.to(device) for value in vars(self).values())

    def expected(self, gemm: Gemm, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The result and the largest error, (M, N) float64. Rows that no group has are zeros."""
        m, n = self.a.shape[0], self.b.shape[1]
        result, error = (torch.zeros(m, n, dtype=torch.float64) for _ in range(2))
        starts = [0, *self.ends.tolist()]
        for group, (start, end) in enumerate(itertools.pairwise(starts)):
            a_scale = rows_of(self.a_scale, gemm.scopes[0], m, slice(start, end))
            b_scale = self.b_scale[group].unsqueeze(1) if gemm.scopes[1] == "row" else self.b_scale[group]
            bias = None if self.bias is None else self.bias[group]
            given = self.a[start:end], a_scale, self.b[group], b_scale
            result[start:end] = casts.scaled_mm(*map(wide, given), None if bias is None else wide(bias), gemm)
            error[start:end] = bounds.gemm_error(*map(wide, given), bias, out_dtype, gemm)
        return result, error


@dataclass(frozen=True)
class Gradients:
    """The arguments of `grouped_wgrad`, on the CPU."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    starts: Tensor

    def on(self, device: str) -> tuple[Any, ...]:
        return tuple(value.to(device) for value in vars(self).values())

    def expected(self, gemm: Gemm, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The result and the largest error, (E, N, K) float64."""
        shape = len(self.starts) - 1, self.a.shape[0], self.b.shape[0]
        result, error = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        for group, (start, end) in enumerate(itertools.pairwise(self.starts.tolist())):
            if start == end:
                continue
            given = []
            for x, scale, scope in zip((self.a, self.b), (self.a_scale, self.b_scale), gemm.scopes, strict=True):
                if scope == "1x128":
                    scale = scale.view(-1, x.shape[0])[start // BLOCK : end // BLOCK].flatten()
                given += [wide(x[:, start:end]), wide(scale[group].unsqueeze(1) if scope == "row" else scale)]
            result[group] = casts.scaled_mm(*given, None, gemm)
            error[group] = bounds.gemm_error(*given, None, out_dtype, gemm)
        return result, error


def wide(x: Tensor) -> Tensor:
    return x.double()


def rows_of(scale: Tensor, scope: str, rows: int, part: slice) -> Tensor:
    """The scales of some of the rows of an operand."""
    if scope == "1x128":
        return scale.view(-1, rows)[:, part].flatten()
    return scale[part] if scope == "row" else scale


def values(*shape: int, element: str) -> Tensor:
    """Values of all magnitudes that a cast from an amax leaves."""
    return (torch.randn(shape) * 64 * torch.exp2(torch.randint(-9, 1, shape))).to(ELEMENTS[element].dtype)


def scales(shape: Sequence[int]) -> Tensor:
    return (torch.rand(shape) + 0.5) * torch.exp2(torch.randint(-12, 2, shape))


def products(sizes: Sequence[int], tail: int, n: int, k: int, gemm: Gemm, bias: torch.dtype | None) -> Products:
    """Groups of so many rows; the rows behind them, and their scales, are NaN."""
    m, e, across = sum(sizes) + tail, len(sizes), -(-k // BLOCK)
    a, b = values(m, k, element=gemm.elements[0]), values(e, n, k, element=gemm.elements[1])
    shapes = {"tensor": (), "row": (m, 1), "1x128": (across * m,)}
    of_b = {"tensor": (e,), "row": (e, n), "128x128": (e, -(-n // BLOCK) * across)}
    a_scale, b_scale = scales(shapes[gemm.scopes[0]]), scales(of_b[gemm.scopes[1]])
    first = m - tail
    a[first:] = torch.nan
    if tail and a_scale.dim():
        a_scale.view(*SCOPES[gemm.scopes[0]].scale_matrix(m, k) if gemm.blocked else (1, m))[:, first:] = torch.nan
    ends = torch.tensor(sizes).cumsum(0).int()
    return Products(a, a_scale, b, b_scale, ends, None if bias is None else torch.randn(e, n).to(bias))


def gradients(sizes: Sequence[int], tail: int, n: int, k: int, gemm: Gemm) -> Gradients:
    """Groups of so many columns, padded with zeros; columns behind them, and scales of groups without any, are NaN."""
    starts = torch.tensor([0, *(-(-size // BLOCK) * BLOCK for size in sizes)]).cumsum(0).int()
    p, e = int(starts[-1]) + tail, len(sizes)
    given: list[Tensor] = []
    for rows, scope, element in zip((n, k), gemm.scopes, gemm.elements, strict=True):
        x = values(rows, p, element=element)
        for start, size, end in zip(starts, sizes, starts[1:], strict=False):
            x[:, int(start) + size : int(end)] = 0.0
        x[:, p - tail :] = torch.nan
        scale = scales({"tensor": (), "row": (e, rows), "1x128": (p // BLOCK * rows,)}[scope])
        if scope == "row":
            scale[torch.tensor(sizes) == 0] = torch.nan
        elif scope == "1x128":
            scale.view(-1, rows)[int(starts[-1]) // BLOCK :] = torch.nan
        given += [x, scale]
    return Gradients(*given, starts)
