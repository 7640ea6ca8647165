"""Casts to the variants of NVFP4 against the oracle."""

import pytest
import torch
from torch import Tensor

from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values
from tests.oracle import casts
from tests.support.microscaled_casts import check

QUANTIZERS = [
    Quantizer("e2m1", scope=scope, candidates=(6.0, 4.0), error_metric=metric, scale_max=most)
    for scope in ("1x16", "16x16")
    for metric, most in (("MAE", 256.0), ("MSE", 448.0))
]


FACTORS_OF_ROWS = [
    Quantizer("e2m1", scope="1x16", factor_scope="row"),
    Quantizer("e2m1", scope="1x16", factor_scope="row", candidates=(6.0, 4.0), error_metric="MAE", scale_max=256.0),
]


factors_of_rows = pytest.mark.parametrize("quantizer", FACTORS_OF_ROWS, ids=["", "4 over 6"])


def copies_of_rows(x: Tensor, quantizer: Quantizer) -> list[tuple[Tensor, ...]]:
    """amax, data, scale_inv of both copies, each with its own amaxes."""
    made = []
    for matrix in (x, x.t()):
        amax = torch.ops.te_inductor.tensor_amax(matrix, True)
        made.append((amax, *torch.ops.te_inductor.quantize(matrix, quantizer, amax)))
    return made


def check_rows(x: Tensor, quantizer: Quantizer, copies=copies_of_rows) -> None:
    for matrix, (amax, *results) in zip((x, x.t()), copies(x, quantizer), strict=True):
        expected = casts.first_amax(matrix, quantizer)
        assert amax.dtype == torch.float32
        assert_same_values(amax, expected)
        check(matrix, quantizer, results, casts.quantize(matrix, quantizer, expected))
