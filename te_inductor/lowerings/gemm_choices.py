"""What multiplies where Inductor asks: its own choices for `aten._scaled_mm`, CUTLASS's kernels beside or instead of them.

Inductor asks its choices handler, which is ours during a compile (tiles.py). Without autotuning there is one answer: the
tuned table's where it names a tile, else cuBLASLt. Under max-autotune Inductor measures all.
"""

from dataclasses import astuple
from typing import Any

from torch._inductor import config
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from te_inductor.templates.cutlass import build, launch
from te_inductor.templates.cutlass import scaled_mm as template
from te_inductor.templates.cutlass.scaled_mm import Problem, Tile

OP = "scaled_mm"  # Inductor's name for what it asks about
# Generated code calls it by this name, also code that a compile cache returns: `lowerings.install` imports this module.
_CUTLASS = ExternKernelChoice(launch.scaled_mm, name="te_inductor_cutlass_scaled_mm")


def extend(choices: list[Any], kernel_inputs: Any, overrides: dict[str, dict[str, Any]] | None) -> list[Any]:
    """`choices` for one `aten._scaled_mm`, with CUTLASS's."""
    problem = _problem(kernel_inputs, overrides or {})
    if problem is None or not choices:
        return choices
    device = kernel_inputs.device()
    if V.graph.cpp_wrapper or not template.runs_on(device):
        return choices
    if config.max_autotune or config.max_autotune_gemm:
        return [*choices, *(_bind(tile, problem, kernel_inputs, choices[0].layout) for tile in template.tiles(problem))]
    tile = template.choose(problem, device)
    return choices if tile is None else [_bind(tile, problem, kernel_inputs, choices[0].layout)]


def _bind(tile: Tile, problem: Problem, kernel_inputs: Any, layout: Any) -> Any:
    build.start(problem.kernel(tile))
    given = {"tile": astuple(tile), "by_row": problem.by_row, "fast_accum": problem.fast_accum}
    return _CUTLASS.bind(kernel_inputs.nodes(), layout, **given)


def _problem(kernel_inputs: Any, overrides: dict[str, dict[str, Any]]) -> Problem | None:
    """None where the sizes are symbolic, or an operand is laid out, scaled or typed as no kernel of ours takes it."""
    a, b, a_scale, b_scale, *bias = kernel_inputs.nodes()
    sizes = [_numbers(x.get_size()) for x in (a, b, a_scale, b_scale)]
    strides = [_numbers(x.get_stride()) for x in (a, b)]
    fast = [given["use_fast_accum"] for given in overrides.values() if "use_fast_accum" in given]
    if any(numbers is None for numbers in (*sizes, *strides)) or not fast:
        return None
    (m, k), (_, n), a_of, b_of = sizes  # type: ignore[misc]
    if strides != [(k, 1), (1, k)]:
        return None
    by_row = (a_of, b_of) == ((m, 1), (1, n))
    if not by_row and (a_of, b_of) != ((), ()):
        return None
    out = kernel_inputs.out_dtype()
    if bias and bias[0].get_dtype() != out:
        return None
    return Problem(m, n, k, a.get_dtype(), b.get_dtype(), out, by_row, bool(bias), bool(fast[0]))


def _numbers(sizes: Any) -> tuple[int, ...] | None:
    if not all(isinstance(size, int) or getattr(size, "is_Integer", False) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)
