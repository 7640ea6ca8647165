"""The kernel that a site's GEMM will run on, for the report and to be built early: by the table that the lowerings
read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config

from te_inductor.config import Options
from te_inductor.ops.stored import nvfp4_way
from te_inductor.passes.graph.gemm_nodes import scope_of
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.match.rule import Match
from te_inductor.recipes import NVFP4WeightOnly, Quantizer, Recipe, Slots
from te_inductor.runtime import small_m
from te_inductor.templates.cutlass import scaled_mm
from te_inductor.templates.cutlass.scaled_mm import NOTHING, OUTPUT, Kernel, Problem

_FEW_ROWS = "triton:fp8_few_rows"


@dataclass(frozen=True)
class Choice:
    """What a GEMM will run on."""

    name: str  # as `Site.kernel` has it
    library: Kernel | None = None  # that has to be built for it


def choose(
    match: Match,
    slots: Slots,
    gemm: str,  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int],  # its (M, N, K)
    options: Options,
    accumulates: bool,  # adds to a total in fp32
) -> Choice:
    """`triton:fp8_few_rows`; `cublaslt`; `cutlass:` and a tile; `inductor`: generated code, or what autotuning will
    find to be fastest, which never sees fp32 scales of blocks, as nothing but cuBLASLt is right for them, nor a GEMM
    that adds to a total."""
    device = value(match.node).device
    if device.type != "cuda":
        return Choice("inductor")
    if _is_of_few_rows(match, slots, gemm, shapes, options):
        return Choice(_FEW_ROWS)
    arch = scaled_mm.architecture(device)
    measured = _measures(options) and (not slots.fprop.blocked or (slots.fprop.microscaled and arch is not None))
    if measured and not accumulates:
        return Choice("inductor")
    problem = None if arch is None else _problem(match, slots, gemm, shapes, arch, accumulates)
    tile = None if problem is None else scaled_mm.choose(problem)
    if problem is None or tile is None:
        return Choice("inductor" if measured else "cublaslt")
    return Choice(f"cutlass:{tile}", problem.kernel(tile))


def _is_of_few_rows(match: Match, slots: Slots, gemm: str, shapes: tuple[Any, int, int], options: Options) -> bool:
    a, b = (quantizer.format.dtype for quantizer in _operands(slots, gemm))
    m = shapes[0]
    most = small_m.at_most(lambda rows: isinstance(m, int) and 0 < m <= rows)
    found = small_m.choose(value(match.node).device, most, shapes[1:], (a, b), getattr(slots, gemm))
    return found is not None and not options.inductor.get("cpp_wrapper", config.cpp_wrapper)


def _problem(
    match: Match, slots: Slots, gemm: str, shapes: tuple[Any, int, int], arch: str, accumulates: bool
) -> Problem | None:
    """None where no table knows it."""
    if not all(isinstance(size, int) for size in shapes):
        return None
    a, b = _operands(slots, gemm)
    out, added = (torch.float32, OUTPUT) if accumulates else (value(match.node).dtype, NOTHING)
    bias = gemm == "fprop" and match.bias is not None
    scope, fast_accum = scope_of(getattr(slots, gemm), shapes[2]), getattr(slots, gemm).fast_accum
    if scope is None:
        return None
    return Problem(arch, *shapes, a.format.dtype, b.format.dtype, out, scope, bias, fast_accum, added)


def _operands(slots: Slots, gemm: str) -> tuple[Quantizer, Quantizer]:
    return {
        "fprop": (slots.input, slots.weight),
        "dgrad": (slots.grad_output, slots.weight),
        "wgrad": (slots.grad_output, slots.input),
    }[gemm]


def of_stored_weight(match: Match, recipe: Recipe | None, options: Options) -> Choice:
    """Of the forward GEMM with a weight that `quantize_` stored."""
    cuda = value(match.node).device.type == "cuda"
    if not isinstance(recipe, NVFP4WeightOnly):
        slots = None if recipe is None else recipe.slots()
        if slots is not None and _is_of_few_rows(match, slots, "fprop", match.sizes, options):
            return Choice(_FEW_ROWS)
        return Choice("cublaslt" if cuda and not _measures(options) else "inductor")
    if not cuda:
        return Choice("eager")
    m, k = match.sizes[0], match.sizes[2]
    x = value(match.node)
    way = nvfp4_way(m, k, x.dtype, x.device, recipe.prefill) if isinstance(m, int) else "recast"
    return Choice({"stored": "triton:nvfp4_linear", "decoded": "triton:nvfp4_fp8"}.get(way, "cublaslt"))


def _measures(options: Options) -> bool:
    return "max-autotune" in (options.mode or "") or any(
        options.inductor.get(name) for name in ("max_autotune", "max_autotune_gemm")
    )
