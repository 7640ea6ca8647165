"""Cases of tests/fuzz.py: what a small random model may be made of, the models, and the strategies that draw them."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_inductor import autocast
from te_inductor.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from tests.experts import FixedExperts
from tests.recipes import NAMES

# Stochastic rounding draws a seed a cast, in the order of the casts, which the two need not share.
INSTANCES: dict[str, Recipe] = {
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "mxfp4": MXFP4BlockScaling(disable_stochastic_rounding=True),
}
# Several recipes of one name in one program are several constants.
VARIANTS: dict[str, Recipe] = {
    "current, powers of 2": Float8CurrentScaling(fp8_quant_fwd_inp=QParams(power_2_scale=True)),
    "current, E4M3": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_bwd_grad=QParams(amax_epsilon=2.0**-20)),
    "rowwise, fp32": Float8RowwiseScaling(power_2_scale=False),
    "block, rows": Float8BlockScaling(w_block_scaling_dim=1),
    "delayed, short": DelayedScaling(amax_history_len=4),
    "mxfp8, square": MXFP8BlockScaling(enable_2d_quantization=True),
}
SEVERAL = [*NAMES, *VARIANTS]
WIDTHS = (16, 32, 40, 64, 96, 128, 130, 160, 256)  # of those, some are refused by some recipes
LEADING = ((1,), (7,), (32,), (2, 5), (3, 1, 4), (128,))
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "relu_": lambda x: x.clone().relu_()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = {"train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@dataclass(frozen=True)
class Case:
    steps: tuple[tuple, ...]  # each: its kind, then what `_module` takes for it
    width: int
    leading: tuple[int, ...]
    recipe: str
    policy: tuple[tuple[str, str], ...] = ()
    dtype: str = "float32"
    mode: str = "train"
    x_grad: bool = True
    frozen: int = 0  # every so many-th parameter has no gradient; 0: all have one
    around: str | None = None  # the recipe of an autocast around the call
    dynamic: bool = False
    weights: str = "each_call"
    wgrad: str = "grad"
    backwards: int = 1  # of one forward
    budget: float = 1.0  # torch's activation memory budget
    seed: int = 0
    breaks: int = 0  # how many steps are before a graph break; 0: there is none
    threads: int = 1  # that call compiled copies at once
    copies: bool = False  # the model goes on as a copy that loads its state


class Broken(nn.Sequential):
    """Two graphs. The break is in no loop, or torch would compile each step by itself."""

    breaks = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x, 0, self.breaks)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.through(x, self.breaks, len(self))

    def through(self, x: Tensor, start: int, end: int) -> Tensor:
        for place in range(start, end):
            x = self[place](x)
        return x


class Step(nn.Module):
    """One step, `function` of its modules and x."""

    def __init__(self, function, *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.parts, x)


# Functions of x and the (N, K) weight; each is F.linear, which takes their place in low precision.
EINSUMS = {
    "plain": lambda x, w: torch.einsum("...d,fd->...f", x, w),
    "transposed": lambda x, w: torch.einsum("...d,df->...f", x, w.t()),
    "weight first": lambda x, w: torch.einsum("fd, ...d -> ...f", (w, x)),
    "rows behind": lambda x, w: torch.einsum("d...,fd->f...", x.movedim(-1, 0), w).movedim(0, -1),
    "heads": lambda x, w: torch.einsum("...d,hed->...he", x, w.view(2, -1, w.shape[1])).flatten(-2),
    "heads, transposed": lambda x, w: (
        torch.einsum("...d,dhe->h...e", x, w.t().reshape(w.shape[1], 2, -1)).movedim(0, -2).flatten(-2)
    ),
    "of heads": lambda x, w: torch.einsum("...he,fhe->...f", x.unflatten(-1, (2, -1)), w.view(w.shape[0], 2, -1)),
}


class Einsum(nn.Linear):
    """A linear layer without a bias, written as an einsum. Contiguous, as ours is: BLAS adds the products of a layer in
    high precision behind it, whose input is laid out otherwise, in another order."""

    def __init__(self, form: str, width: int, size: int) -> None:
        super().__init__(width, size, bias=False)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return EINSUMS[self.form](x, self.weight).contiguous()


def _in_region(recipe: str | None, steps: nn.Module, x: Tensor) -> Tensor:
    with autocast(enabled=recipe != "none", recipe=None if recipe in (None, "none") else recipe_of(recipe)):
        return steps(x)


def _in_amp(steps: nn.Module, x: Tensor) -> Tensor:
    # torch refuses `cat` of fp16 there. Traced code has no cache of casts either: a weight's two uses, which share a
    # cast in the cache, would add their gradients in bf16 in eager code alone.
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype != torch.float16, cache_enabled=False):
        return steps(x).to(x.dtype)


def recipe_of(name: str) -> Recipe | str:
    return {**INSTANCES, **VARIANTS}.get(name, name)


def plain(name: str) -> str:
    """The name that a report has for the recipe."""
    return VARIANTS[name].name if name in VARIANTS else name


def _residual(parts: nn.ModuleList, x: Tensor) -> Tensor:
    y = parts[1](parts[0](x))
    return x + y if x.shape == y.shape else y  # what is inside may have changed the rows


def _halves(parts: nn.ModuleList, x: Tensor) -> Tensor:
    gate, up = parts[0](x).chunk(2, -1)
    return F.silu(gate) * up


def _heads(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """Turns heads as attention does: q, k and v of one input, cut in heads."""
    q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(-2, -3) for part in parts)
    return (torch.tanh(q * k) + v).transpose(-2, -3).flatten(-2)


WRITES = {
    "weight": lambda layer: layer.weight.mul_(-0.5),
    "data": lambda layer: layer.weight.data.clamp_(-0.05, 0.05),
    "rows": lambda layer: layer.weight[::3].zero_(),
    "list": lambda layer: torch._foreach_mul_(list(layer.parameters()), -0.5),
}


def _written(write: str, parts: nn.ModuleList, x: Tensor) -> Tensor:
    """Two layers of one input, the second one's parameters written in between."""
    y = parts[0](x)
    with torch.no_grad():
        WRITES[write](parts[1])
    return torch.cat([y, parts[1](x)], -1)


RESHAPES = {
    "flatten": lambda parts, x: x.reshape(-1, x.shape[-1]),
    "unsqueeze": lambda parts, x: x.unsqueeze(0),
    "transpose": lambda parts, x: x.transpose(0, -2),
    "flip": lambda parts, x: x.flip(0),
    "reversed copy": lambda parts, x: torch.cat([x, x.flip(0)], 0),
    "strided": lambda parts, x: torch.stack([x, x], -1)[..., 0],
}


def _module(step: tuple, width: int) -> tuple[nn.Module, int]:
    """A step's module for inputs of this width, and the width of its outputs."""
    kind, *of = step
    if kind == "linear":
        return nn.Linear(width, of[0], bias=of[1]), of[0]
    if kind == "einsum":
        return Einsum(of[0], width, of[1]), of[1]
    if kind == "norm":
        return (nn.LayerNorm if of[0] == "layer" else nn.RMSNorm)(width), width
    if kind == "act":
        return Step(lambda _, x: ACTIVATIONS[of[0]](x)), width
    if kind == "reshape":
        return Step(RESHAPES[of[0]]), width
    if kind == "gated":
        return Step(_halves, nn.Linear(width, 2 * of[0])), of[0]
    if kind == "heads":
        return Step(_heads, *(nn.Linear(width, of[0], bias=of[1]) for _ in range(3))), of[0]
    if kind == "shared":
        layers = [nn.Linear(width, size, bias=of[1]) for size in of[0]]
        return Step(lambda parts, x: torch.cat([part(x) for part in parts], -1), *layers), sum(of[0])
    if kind == "written":
        layers = [nn.Linear(width, size, bias=of[2]) for size in of[1]]
        return Step(partial(_written, of[0]), *layers), sum(of[1])
    if kind == "experts":
        return FixedExperts(width, *of), of[0]
    if kind == "twice":
        return Step(lambda parts, x: parts[0](torch.tanh(parts[0](x))), nn.Linear(width, width)), width
    inner, out = sequence(of[-1], width)
    if kind == "residual":
        return Step(_residual, inner, nn.Linear(out, width)), width
    if kind == "checkpoint":
        return Step(lambda parts, x: checkpoint(parts[0], x, use_reentrant=False), inner), out
    if kind == "amp":
        return Step(lambda parts, x: _in_amp(parts[0], x), inner), out
    assert kind == "region", kind
    return Step(lambda parts, x: _in_region(of[0], parts[0], x), inner), out


def sequence(steps: tuple[tuple, ...], width: int) -> tuple[nn.Sequential, int]:
    modules = []
    for step in steps:
        module, width = _module(step, width)
        modules.append(module)
    return nn.Sequential(*modules), width


widths = st.sampled_from(WIDTHS)
some_recipe = st.sampled_from(SEVERAL)
_simple = st.one_of(
    st.tuples(st.just("linear"), widths, st.booleans()),
    st.tuples(st.just("einsum"), st.sampled_from(list(EINSUMS)), widths),
    st.tuples(st.just("norm"), st.sampled_from(["layer", "rms"])),
    st.tuples(st.just("act"), st.sampled_from(list(ACTIVATIONS))),
    st.tuples(st.just("gated"), widths),
    st.tuples(st.just("heads"), st.sampled_from([32, 128, 256]), st.booleans()),
    st.tuples(st.just("shared"), st.lists(widths, min_size=2, max_size=3).map(tuple), st.booleans()),
    st.tuples(st.just("twice")),
    st.tuples(st.just("experts"), widths, st.sampled_from([1, 3, 8])),
    st.tuples(st.just("reshape"), st.sampled_from(list(RESHAPES))),
)


def _nested(steps: st.SearchStrategy) -> st.SearchStrategy:
    several = st.lists(steps, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.tuples(st.just("residual"), several),
        st.tuples(st.just("checkpoint"), several),
        st.tuples(st.just("amp"), several),
        st.tuples(st.just("region"), st.one_of(st.none(), st.just("none"), some_recipe), several),
    )


# At the top only: a checkpoint would write again in the backward.
_writing = st.tuples(st.just("written"), st.sampled_from(list(WRITES)), st.tuples(widths, widths), st.booleans())
_anything = st.recursive(_simple, _nested, max_leaves=5)
_steps = st.lists(st.one_of(_anything, _anything, _anything, _writing), min_size=1, max_size=4).map(tuple)
_policies = st.dictionaries(
    st.sampled_from(["0", "*", "*parts.0*", "[12]*", "*.1"]), st.sampled_from([*SEVERAL, "none"]), max_size=3
).map(lambda policy: tuple(policy.items()))
cases = st.builds(
    Case,
    steps=_steps,
    width=widths,
    leading=st.sampled_from(LEADING),
    recipe=st.sampled_from([*SEVERAL, "none"]),
    policy=_policies,
    dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]),
    mode=st.sampled_from(["train", "train", "train", "no_grad", "inference"]),
    x_grad=st.booleans(),
    frozen=st.sampled_from([0, 0, 2, 3]),
    around=st.one_of(st.none(), st.none(), some_recipe, st.just("none")),
    dynamic=st.booleans(),
    weights=st.sampled_from(["each_call", "once"]),
    wgrad=st.sampled_from(["grad", "grad", "main_grad", "deferred"]),
    backwards=st.sampled_from([1, 1, 2]),
    budget=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    seed=st.integers(0, 2**16),
    breaks=st.sampled_from([0, 0, 0, 1, 2]),
    threads=st.sampled_from([1] * 7 + [2]),
    copies=st.sampled_from([False] * 4 + [True]),
)
