"""The kernel that a site's GEMM will run on, for the report and to be built early: `templates.select` says which."""

from typing import Any

import torch
from torch._inductor import config

from te_inductor import targets
from te_inductor.config import Options
from te_inductor.ops import experts
from te_inductor.ops.stored import nvfp4_way
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import Gemm, NVFP4WeightOnly, Quantizer, Recipe, Slots
from te_inductor.runtime.eager import grouped
from te_inductor.templates import small_m
from te_inductor.templates.cutlass.scaled_mm import NOTHING, OUTPUT
from te_inductor.templates.select import LIBRARY, Choice, Problem, select

EXPERTS = "triton:experts_decode"
NVFP4 = {"stored": "triton:nvfp4_linear", "decoded": "triton:nvfp4_fp8"}  # by what `nvfp4_way` says


def choose(
    match: Match,
    slots: Slots,
    gemm: str,  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int],  # its (M, N, K)
    options: Options,
    accumulates: bool = False,  # adds to a total in fp32
    turned: bool = False,  # a wgrad whose operands are in the other order
    leaves: bool = False,  # as part of a program that leaves this process
) -> Choice:
    """What will run it."""
    a, b = _operands(slots, gemm)[:: -1 if turned else 1]
    constants: Gemm = getattr(slots, gemm)
    m, n, k = (size if isinstance(size, int) else None for size in shapes)
    y = value(match.node)
    problem = Problem(
        y.device,
        *(m, n, k),
        *(a.format.dtype, b.format.dtype),
        torch.float32 if accumulates else y.dtype,
        constants.transposed if turned else constants,
        bias=gemm == "fprop" and match.bias is not None,
        at_most=small_m.at_most(lambda rows: m is not None and 0 < m <= rows),
        added=OUTPUT if accumulates else NOTHING,
        autotunes=_autotunes(options),
        grouped=match.groups is not None,
        held=value(match.weight).dtype,
        leaves=leaves,
        cpp_wrapper=leaves or is_cpp(options),
    )
    return select(problem)


def _operands(slots: Slots, gemm: str) -> tuple[Quantizer, Quantizer]:
    return {
        "fprop": (slots.input, slots.weight),
        "dgrad": (slots.grad_output, slots.weight),
        "wgrad": (slots.grad_output, slots.input),
    }[gemm]


def of_stored_weight(match: Match, recipe: Recipe | None, options: Options, leaves: bool = False) -> str:
    """The name of what runs the forward GEMM with a weight that `quantize_` stored."""
    if match.groups is not None:
        return _of_stored_experts(match, recipe, options, leaves)
    if recipe is not None and not isinstance(recipe, NVFP4WeightOnly):
        return choose(match, recipe.slots(), "fprop", match.sizes, options, leaves=leaves).name
    m, _, k = match.sizes
    x = value(match.node)
    if x.device.type != "cuda":
        return "eager"
    way = nvfp4_way(m, k, x.dtype, x.device, recipe.prefill) if recipe and isinstance(m, int) else "recast"
    return NVFP4.get(way, LIBRARY)


def of_stored_gradient(
    match: Match, recipe: Recipe | None, shapes: tuple[Any, int, int], options: Options, leaves: bool = False
) -> str:
    """The name of what runs dgrad with such a weight: Note [dgrad through stored values]."""
    if match.groups is not None or recipe is None or isinstance(recipe, NVFP4WeightOnly):
        return "high_precision"
    slots = recipe.slots()
    if slots.weight.granularity.blocked:
        return "high_precision"
    return choose(match, slots, "dgrad", shapes, options, leaves=leaves).name


def _of_stored_experts(match: Match, recipe: Recipe | None, options: Options, leaves: bool) -> str:
    x, (m, *_), device = value(match.node), match.sizes, value(match.weight).device
    if device.type != "cuda" or recipe is None:
        return "eager"
    nvfp4 = isinstance(recipe, NVFP4WeightOnly)
    target = targets.of(device)
    kernel = x.dtype in experts.DTYPES and (target.nvfp4_kernels if nvfp4 else target.fp8)
    if kernel and isinstance(m, int) and experts.is_few(m, match.experts):
        return EXPERTS
    if nvfp4 or not grouped.has_kernel(device, recipe.slots().fprop):
        return LIBRARY
    return choose(match, recipe.slots(), "fprop", match.sizes, options, leaves=leaves).name


def is_cpp(options: Options) -> bool:
    """Whether generated code is C++."""
    return bool(options.inductor.get("cpp_wrapper", config.cpp_wrapper))


def _autotunes(options: Options) -> bool:
    return "max-autotune" in (options.mode or "") or any(
        options.inductor.get(name) for name in ("max_autotune", "max_autotune_gemm")
    )
