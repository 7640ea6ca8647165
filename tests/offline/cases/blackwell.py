"""Layers for compute capability 10.0."""

from typing import Any

import torch
from torch import nn

from te_inductor import recipes
from tests.offline.cases.common import Case
from tests.offline.cases.experts import GroupedLinear


def _linear_blackwell(recipe: str, columns: int = 88, **options: Any) -> Case:
    """Two tiles of rows of scales, two of blocks; an N to pad."""
    layer = nn.Linear(160, columns, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(130, 160, device="cuda", dtype=torch.bfloat16)
    return torch.compile(layer, backend="te", fullgraph=True, options={"policy": {"*": recipe}, **options}), (x,)


def linear_blackwell_mxfp8() -> Case:
    return _linear_blackwell("mxfp8")


def linear_blackwell_nvfp4() -> Case:
    return _linear_blackwell("nvfp4")


def cutlass_blackwell_nvfp4() -> Case:
    return _linear_blackwell("nvfp4", 144, max_autotune=True)


def _grouped_blackwell(recipe: recipes.Recipe, trains: bool = True) -> Case:
    """Rows that fill no tile, behind the groups too; two tiles of a weight's rows of scales, and of blocks."""
    x = torch.randn(150, 96, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
    ends = torch.empty(3, device="cuda", dtype=torch.int32)
    model = GroupedLinear(3, 160, 96).requires_grad_(trains)
    return torch.compile(model, backend="te", fullgraph=True, options={"policy": {"*": recipe}}), (x, ends)


def grouped_blackwell_mxfp8() -> Case:
    return _grouped_blackwell(recipes.MXFP8BlockScaling())


def grouped_blackwell_mxfp4() -> Case:
    return _grouped_blackwell(recipes.MXFP4BlockScaling(disable_stochastic_rounding=True))


def grouped_blackwell_nvfp4() -> Case:
    return _grouped_blackwell(recipes.NVFP4BlockScaling(disable_stochastic_rounding=True))


def grouped_blackwell_inference() -> Case:
    return _grouped_blackwell(recipes.NVFP4BlockScaling(), trains=False)
