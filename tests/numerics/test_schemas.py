"""The schemas of ops, which are the signatures of the functions that compute them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from te_inductor.recipes import Gemm
from te_inductor.runtime.definition import schema_of
from te_inductor.runtime.eager import Written


def plain(x: Tensor, dim: int, size: int | torch.SymInt, factor: float, text: str, dtype: torch.dtype) -> Tensor:
    raise NotImplementedError


def optional(pieces: Sequence[Tensor], bias: Tensor | None, more: list[Tensor] | None = None, on: bool = False) -> None:
    raise NotImplementedError


def written(totals: list[Written], sizes: Sequence[int | torch.SymInt], amax: Written | None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def of_constants(x: Tensor, gemm: Gemm) -> list[Tensor]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "schema"),
    [
        (plain, "(Tensor x, int dim, SymInt size, float factor, str text, ScalarType dtype) -> Tensor"),
        (optional, "(Tensor[] pieces, Tensor? bias, Tensor[]? more=None, bool on=False) -> ()"),
        (written, "(Tensor(a!)[] totals, SymInt[] sizes, Tensor(b!)? amax) -> (Tensor, Tensor)"),
        (of_constants, "(Tensor x, te_inductor.recipes.quantizers.Gemm gemm) -> Tensor[]"),
    ],
)
def test_a_schema_is_a_signature(function, schema):
    assert schema_of(function) == schema


def test_kernels_for_cuda_are_of_ops_that_there_are():
    """`implement_on_cuda` takes names, and torch takes a kernel of an op that nobody defines."""
    pytest.importorskip("triton")
    from te_inductor import fused, lowerings  # noqa: F401
    from te_inductor.templates.triton import decode_attention, grouped_ops, scale_updates, stored_ops  # noqa: F401

    assert not [one for one in torch._C._dispatch_find_dangling_impls() if "te_inductor::" in one]
