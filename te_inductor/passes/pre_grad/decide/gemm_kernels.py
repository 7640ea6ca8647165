"""The kernel that a site's GEMM will run on, for the report and to be built early: `kernels.select` says which."""

from typing import Any

import torch

from te_inductor import targets
from te_inductor.kernels import cublaslt, fp8_small_m, nvfp4_linear, plain
from te_inductor.kernels.family import Choice
from te_inductor.kernels.problem import NOTHING, OUTPUT, Epilogue, Problem, Program, Sizes, Stored
from te_inductor.kernels.select import select
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import Gemm, NVFP4WeightOnly, Recipe, Slots
from te_inductor.recipes.formats import E2M1


def choose(
    match: Match,
    slots: Slots,
    gemm: str,  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int],  # its (M, N, K)
    program: Program,
    accumulates: bool = False,  # adds to a total in fp32
    turned: bool = False,  # a wgrad whose operands are in the other order
) -> Choice:
    """What will run it."""
    constants: Gemm = getattr(slots, gemm)
    y, held = value(match.node), value(match.weight).dtype
    epilogue = Epilogue(gemm == "fprop" and match.bias is not None, OUTPUT if accumulates else NOTHING)
    own = held if gemm == "wgrad" else y.dtype  # under autocast a gradient is in fp32 as its weight is
    problem = Problem(
        targets.of(y.device),
        _sizes(match, shapes),
        constants.transposed if turned else constants,
        torch.float32 if accumulates else own,
        epilogue,
        program,
        held=held,
    )
    return select(problem)


def _sizes(match: Match, shapes: tuple[Any, int, int]) -> Sizes:
    m, n, k = (size if isinstance(size, int) else None for size in shapes)
    at_most = fp8_small_m.at_most(lambda rows: m is not None and 0 < m <= rows)
    return Sizes(m, n, k, None if match.groups is None else match.experts, at_most)


def of_stored_weight(match: Match, recipe: Recipe | None, program: Program) -> Choice:
    """What will run the forward GEMM with a weight that `quantize_` stored."""
    y = value(match.node)
    target, sizes = targets.of(y.device), _sizes(match, match.sizes)
    if recipe is None:
        return Choice(cublaslt.WRITTEN_OUT if target.is_gpu and match.groups is None else plain.EAGER)
    if isinstance(recipe, NVFP4WeightOnly):
        stored = Stored(E2M1.name, y.dtype, recipe.prefill == "fp8")
        return select(Problem(target, sizes, nvfp4_linear.PREFILL, y.dtype, program=program, stored=stored))
    slots = recipe.slots()
    if match.groups is None:
        return choose(match, slots, "fprop", match.sizes, program)
    stored = Stored(slots.weight.element, y.dtype)
    return select(Problem(target, sizes, slots.fprop, y.dtype, program=program, stored=stored))


def of_stored_gradient(
    match: Match, recipe: Recipe | None, shapes: tuple[Any, int, int], program: Program
) -> Choice | None:
    """What will run dgrad with such a weight: Note [dgrad through stored values]. None where it is in high precision."""
    if match.groups is not None or recipe is None or isinstance(recipe, NVFP4WeightOnly):
        return None
    slots = recipe.slots()
    if slots.weight.granularity.blocked:
        return None
    return choose(match, slots, "dgrad", shapes, program)
