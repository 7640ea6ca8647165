"""A layer whose forward and backward stand in one traced graph, behind `lower`, against the oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import lower
from tests.recipes import strict
from tests.support.oracle_layers import RECIPES, check_against_oracle
from tests.support.traced_graphs import fakes

pytestmark = pytest.mark.usefixtures("known_seeds")


def products(graph: torch.fx.GraphModule) -> list[str]:
    """The products in high precision."""
    targets = [str(node.target) for node in graph.graph.nodes]
    return [target for target in targets if target.startswith(("aten.mm", "aten.addmm", "aten.bmm"))]


def lowered(recipe, dynamic: bool, operands: list[Tensor], dy: Tensor) -> torch.fx.GraphModule:
    """The graph of y and the gradients of all operands, as a function of them and dy."""

    def step(*given):
        *leaves, g = (one.detach().requires_grad_() for one in given)
        y = F.linear(*leaves)
        return y, *torch.autograd.grad(y, leaves, g)

    inputs = fakes([*operands, dy], [operands[0], dy] if dynamic else [])
    with inputs[0].fake_mode:
        graph = make_fx(step)(*inputs)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    options = {"policy": {"layer": recipe}, "recipe": "none", "fallback": strict(recipe.name)}
    made = lower(graph, options, parameters={names[1]: "layer.weight"})
    assert len(products(graph)) == 3 and not products(made)
    return made


QUICK = ("hybrid", "rowwise", "block", "mxfp8", "nvfp4")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "recipe",
    [recipe if name in QUICK else pytest.param(recipe, marks=pytest.mark.thorough) for name, recipe in RECIPES.items()],
    ids=RECIPES,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("size", [(33, 126, 256), (48, 256, 128)], ids=str)
def test_against_the_oracle(size, dynamic, with_bias, dtype, recipe):
    m, n, k = size
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    operands = [x, weight, *([torch.randn(n).to(dtype)] if with_bias else [])]
    dy = torch.randn(m, n).to(dtype)
    y, *gradients = lowered(recipe, dynamic, operands, dy)(*operands, dy)
    for operand, gradient in zip(operands, gradients, strict=True):
        operand.grad = gradient
    check_against_oracle(x, weight, operands[2] if with_bias else None, recipe, dy, y)
