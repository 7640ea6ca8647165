"""Layers in the bodies of higher-order ops: whose operands those of a body are, and so what reports call the layer, and
which parameter they find for it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor.backend import parse, run_passes
from te_inductor.errors import FallbackError
from te_inductor.passes.pre_grad import DECIDE
from te_inductor.passes.pre_grad.plan import Plan
from tests import uncompiled

WIDTH = 64
ZERO = torch.tensor(0)


class Layers(nn.Module):
    """One layer in a body between two that are in none."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, self.between)(self.first(x)))

    def loop(self, x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.inner(x)), (ZERO, x))[1]

    def stacked(self, x: Tensor) -> Tensor:
        op, weight = torch.ops.higher_order.while_loop_stack_output, self.inner.weight
        return op(lambda i, x: i < 3, lambda i, x: (i + 1, F.linear(x, weight)), (ZERO, x), ())[1][-1]

    def carried(self, x: Tensor) -> Tensor:
        """The weight of one run is not that of the next."""

        def body(i: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return i + 1, F.linear(x, w), w * 2

        return while_loop(lambda i, x, w: i < 3, body, (ZERO, x, self.inner.weight * 1))[1]

    def branch(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: x.sin(), (x,))

    def loop_in_branch(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.loop, lambda x: x.sin(), (x,))

    def mapped(self, x: Tensor) -> Tensor:
        return map_rows(lambda x: self.inner(x), x.view(2, -1, WIDTH)).view(-1, WIDTH)

    def scanned(self, x: Tensor) -> Tensor:
        return scan(lambda c, x: (c + 1, self.inner(x)), ZERO, x.view(2, -1, WIDTH))[1].view(-1, WIDTH)

    def associative(self, x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: self.inner(a) + b, x, 0, combine_mode="generic")

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)

    def region(self, x: Tensor) -> Tensor:
        return self.compiled_once(self.compiled_once(x))

    @torch.compiler.nested_compile_region
    def compiled_once(self, x: Tensor) -> Tensor:
        return self.inner(x)


BODIES = [name for name in vars(Layers) if name not in ("forward", "compiled_once") and not name.startswith("_")]


def plans(model: nn.Module, **options: Any) -> list[Plan]:
    """The plans of a call's graphs."""
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(Plan(gm, parse(None, options), inputs))
        found[-1].report = run_passes(found[-1], DECIDE)
        return gm

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(32, WIDTH))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("between", BODIES)
def test_names_and_weights_of_layers_in_bodies(between, recipe):
    model = Layers(between)
    [plan] = plans(model, recipe=recipe, fallback="silent", weights="once")
    assert plan.outcome.report.failure is None
    inner = {site.fqn for site in plan.outcome.report.sites} - {"first", "last"}
    expected = {"first": model.first.weight, "last": model.last.weight, "inner": model.inner.weight}
    if between == "carried":
        assert inner == {""}
        del expected["inner"]
    else:
        assert inner == {"inner"}
    assert {name: id(weight) for name, weight in plan.outcome.weights.items()} == {
        name: id(weight) for name, weight in expected.items()
    }


def test_the_layer_in_a_body_is_accused():
    """It is not the one whose parameter is the graph's input at that place."""
    model = Layers("loop")
    options = {"recipe": "current", "policy": {"inner": "none", "*": "current"}}
    x = torch.randn(32, WIDTH)
    with uncompiled.patched(), torch.no_grad():
        compiled = torch.compile(model, backend="te", fullgraph=True, options=options)
        te_inductor.assert_low_precision(compiled, x, high_precision=["inner"])
        with pytest.raises(FallbackError, match=r"1 of 3 layers ran in high precision:\n.*: inner\n"):
            te_inductor.assert_low_precision(compiled, x)
