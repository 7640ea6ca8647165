"""Layers whose GEMMs are CUTLASS's kernels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.offline.cases.common import EACH, Case, Mlp
from tests.offline.cases.layers import mlp_training_block, mlp_training_delayed, mlp_training_main_grad


def cutlass_residual() -> Case:
    return mlp_training_delayed()


def cutlass_residual_block() -> Case:
    return mlp_training_block()


def cutlass_quantized() -> Case:
    """GELU's MLP in inference, within a factor of two of what the table has."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    model = nn.Sequential(nn.Linear(512, 2048, **made), nn.GELU(), nn.Linear(2048, 512, **made))
    run = torch.compile(model, backend="te", fullgraph=True, options={"policy": {"*": "delayed"}})
    return torch.no_grad()(run), (torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16),)


def cutlass_main_grad() -> Case:
    return mlp_training_main_grad()


def cutlass_training(recipe: str = "current") -> Case:
    layer = nn.Linear(4096, 6144, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(layer, backend="te", fullgraph=True, options={"recipe": recipe}), (x,)


def cutlass_blocks() -> Case:
    return cutlass_training("block")


def _gated(run: Callable[[Mlp, Tensor], Tensor] = lambda model, x: model(x), bias: bool = False) -> Case:
    model = Mlp(2048, 8192, bias)
    x = torch.randn(4, 4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": "block", **EACH}
    return torch.compile(lambda x: run(model, x), backend="te", fullgraph=True, options=options), (x,)


def cutlass_gated() -> Case:
    """x has three dimensions."""
    return _gated()


def cutlass_gated_checkpointed() -> Case:
    """gate and up are computed again by the backward."""
    return _gated(lambda model, x: checkpoint(model, x, use_reentrant=False))


def cutlass_gated_bias() -> Case:
    """The biases' gradients are sums of gate's and up's."""
    return _gated(bias=True)


def checkpointed_block() -> Case:
    """The backward alone wants down's column copy, and no row copy."""
    return cutlass_gated_checkpointed()
