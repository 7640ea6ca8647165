"""The limits that torchao and TransformerEngine publish in their own tests, for recipes that they share with this package:
layers of their sizes, by their seeds and data, compared with high precision as they compare. docs/numerics.md has the
table, which this file computes: `python -m tests.numerics.test_published_thresholds`.

What their tests have on a GPU runs here by the ops' eager kernels on the CPU, whose random numbers are others for the same
seed, and sums are fp32. Sizes are theirs, but in three files: layers of 4096 to 128256 columns are 256 to 1024 wide here,
and MX blocks of 2, which are of no format, are of 32.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_inductor import recipes
from tests.uncompiled import patched


def sqnr(exact: Tensor, low: Tensor) -> float:
    """The ratio in dB, as torchao's compute_error has it."""
    exact, low = exact.double(), low.double()
    return 20 * math.log10(exact.norm() / (exact - low).norm())


def mean_relative(exact: Tensor, low: Tensor) -> float:
    """The mean of absolute relative errors, as TransformerEngine's tests of exact recipes have it."""
    return ((low - exact) / exact).abs().double().mean().item()


class FeedForward(nn.Module):
    """w2(silu(w1(x)) * w3(x)), of torchao's integration test: there 4096 to 14336 wide, or more, with 8192 rows."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@dataclass(frozen=True)
class Published:
    """One test of another package's."""

    source: str  # its repository, file and function
    recipes: tuple[Any, ...]
    seeds: tuple[int, ...]  # of several the median counts
    model: Callable[[], nn.Module]
    rows: tuple[int, ...]  # of x, whose last size is its columns
    dtype: torch.dtype
    measure: Callable[[Tensor, Tensor], float]
    limits: dict[str, float]  # of "y", "dgrad", "wgrad"
    gradient: Callable[[Tensor], Tensor] = torch.ones_like  # of the output; ones are those of its sum
    steps: int = 1  # of other data each, the last of which counts: delayed scaling has a past


_AO, _TE = "torchao, test/", "TransformerEngine, tests/pytorch/"
WGRAD_HIGH = recipes.Float8RowwiseScaling(backward={"wgrad": "high_precision"})
PUBLISHED = [
    Published(
        f"{_AO}float8/test_base.py, _test_linear_impl",
        ("current", "delayed", "rowwise", WGRAD_HIGH),
        *((0,), lambda: nn.Linear(16, 32), (16, 16), torch.bfloat16, sqnr),
        {"y": 18.0, "wgrad": 17.0},
        steps=2,
    ),
    Published(
        f"{_AO}float8/test_numerics_integration.py, _test_impl",
        ("current", "rowwise", WGRAD_HIGH),
        *((0,), lambda: FeedForward(256, 1024), (1, 512, 256), torch.bfloat16, sqnr),
        {"y": 20.0, "wgrad": 20.0},
        steps=2,
    ),
    Published(
        f"{_AO}prototype/mx_formats/test_mx_linear.py, test_linear_eager",
        ("mxfp8",),
        *((2,), lambda: nn.Linear(32, 64), (32, 32), torch.float32, sqnr),
        {"y": 18.0, "dgrad": 14.0, "wgrad": 18.0},
        gradient=torch.randn_like,
    ),
    Published(
        f"{_AO}prototype/blockwise_fp8_training/test_blockwise_linear.py, _run_blockwise_quant_linear_fwd_bwd",
        ("block",),
        *((0,), lambda: nn.Linear(256, 512, bias=False), (1, 256, 256), torch.float32, sqnr),
        {"y": 25.0, "dgrad": 30.0, "wgrad": 30.0},
    ),
    Published(
        f"{_TE}test_float8_current_scaling_exact.py, test_fp8_current_scaling_with_linear_module",
        ("current",),
        *((1234, 0, 1, 2, 3), lambda: nn.Linear(256, 128), (16, 256), torch.bfloat16, mean_relative),
        {"y": 0.5, "dgrad": 1.0, "wgrad": 1.0},
        gradient=torch.randn_like,
    ),
]


def measured(one: Published, recipe: Any) -> Iterator[tuple[str, float, float]]:
    """Yields what was measured of each tensor, and the limit. Means of relative errors hang on the one element that is
    nearest to zero, so that several seeds are asked: of 13, three had one of the means above TransformerEngine's limits."""
    found = [_measured(one, recipe, seed) for seed in one.seeds]
    for name, limit in one.limits.items():
        yield name, median(each[name] for each in found), limit


def _measured(one: Published, recipe: Any, seed: int) -> dict[str, float]:
    """What was measured of each tensor, the worst of several weights."""
    torch.manual_seed(seed)
    model = one.model()
    if one.measure is mean_relative:  # TransformerEngine's weights are as its other tensors are
        nn.init.normal_(model.weight)  # type: ignore[arg-type]
    model.to(one.dtype)
    xs = [torch.randn(*one.rows, dtype=one.dtype) for _ in range(one.steps)]
    with torch.no_grad():
        gradient = one.gradient(model(xs[0]))
    twin = copy.deepcopy(model)
    with patched():
        # A layer that is emulated says so.
        options = {"policy": {"*": recipe}, "fallback": "silent" if recipe in ("mxfp8", "nvfp4") else "error"}
        compiled = torch.compile(twin, backend="te", options=options)
        exact, low = (_run(module, call, xs, gradient) for module, call in ((model, model), (twin, compiled)))
    worst = min if one.measure is sqnr else max
    pairs = {name: zip(exact[name], low[name], strict=True) for name in one.limits}
    return {name: worst(one.measure(a, b) for a, b in pairs[name]) for name in pairs}


def _run(module: nn.Module, call: Any, xs: list[Tensor], gradient: Tensor) -> dict[str, list[Tensor]]:
    for x in xs:
        module.zero_grad()
        x = x.clone().requires_grad_()
        y = call(x)
        y.backward(gradient)
    weights = [weight.grad for name, weight in module.named_parameters() if name.endswith("weight")]
    return {"y": [y.detach()], "dgrad": [x.grad], "wgrad": weights}  # type: ignore[dict-item, list-item]


CASES = [(one, recipe) for one in PUBLISHED for recipe in one.recipes]


@pytest.mark.parametrize(("one", "recipe"), CASES, ids=lambda case: getattr(case, "source", str(case))[-40:])
def test_what_others_ask_of_their_recipes_holds_here(one, recipe):
    for name, found, limit in measured(one, recipe):
        assert found >= limit if one.measure is sqnr else found < limit, (name, found, limit)
        if name == "y":  # which in high precision would be better than this
            assert found < 45 if one.measure is sqnr else found > 0.01


def test_the_limits_can_fail():
    """NVFP4 does not reach torchao's limits for FP8."""
    assert any(found < limit for _, found, limit in measured(PUBLISHED[0], "nvfp4"))


def main() -> None:
    """Prints the table of docs/numerics.md."""
    for one, recipe in CASES:
        named = f"`{recipe}`" if isinstance(recipe, str) else "`rowwise`, wgrad in high precision"
        cells = {name: f"{found:.3g} ({limit:g})" for name, found, limit in measured(one, recipe)}
        print(f"| {named} | {one.source} | {' | '.join(cells.get(name, '') for name in ('y', 'dgrad', 'wgrad'))} |")


if __name__ == "__main__":
    main()
