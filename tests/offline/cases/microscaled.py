"""Casts with scales of microscaling formats."""

from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import ops
from tests.offline.cases.common import Case, cast_both_ways


def two_way_cast_mxfp8() -> Case:
    """Whole blocks."""
    return cast_both_ways(64, 96, scope="1x32")


def two_way_cast_mxfp8_padded() -> Case:
    return cast_both_ways(20, 70, scope="1x32")


def two_way_cast_mxfp8_squares() -> Case:
    return cast_both_ways(40, 70, scope="32x32")


def two_way_cast_mxfp6() -> Case:
    """One code a byte."""
    return cast_both_ways(20, 70, scope="1x32", element="e3m2")


def two_way_cast_mxfp6_squares() -> Case:
    return cast_both_ways(40, 70, scope="32x32", element="e2m3")


def linear_mxfp6() -> Case:
    """A layer's three products, which no tensor core multiplies."""
    from te_inductor.recipes import CustomRecipe

    model = nn.Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    options = {"recipe": CustomRecipe(_sixes), "policy": {"*": CustomRecipe(_sixes)}}
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", options=options), (x,)


def _sixes(slot: str, module: str) -> Any:
    from te_inductor.recipes import Quantizer

    return None if slot in ("fprop", "dgrad", "wgrad") else Quantizer("e2m3", scope="1x32")


def _nvfp4_casts(rows: int, columns: int, scope: str, stochastic: bool) -> Case:
    """Both copies, and the transform of the transpose; as of a gradient, or of a weight."""
    from te_inductor.recipes import Quantizer

    quantizer = Quantizer("e2m1", scope=scope, stochastic=stochastic)

    def function(x: Tensor, amax: Tensor, seed: Tensor) -> Any:
        if not stochastic:
            return ops.quantize_rowcol(x, quantizer, amax)
        copies = (ops.quantize(matrix, quantizer, amax, seed) for matrix in (x, x.t()))
        return *next(copies), *next(copies), ops.hadamard(x.t()), ops.tensor_amax(x)

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    amax, seed = torch.ones((), device="cuda"), torch.ones((), device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (x, amax, seed)


def nvfp4_gradient() -> Case:
    return _nvfp4_casts(20, 70, "1x16", stochastic=True)


def nvfp4_input() -> Case:
    return _nvfp4_casts(32, 64, "1x16", stochastic=False)


def nvfp4_weight() -> Case:
    return _nvfp4_casts(20, 70, "16x16", stochastic=False)
