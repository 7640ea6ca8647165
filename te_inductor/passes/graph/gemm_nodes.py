"""GEMMs of a graph behind autograd, for the passes that give one more to do."""

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128
from te_inductor.runtime import small_m
from te_inductor.runtime.eager import BLOCK_SCALES
from te_inductor.templates.cutlass import scaled_mm as template
from te_inductor.templates.cutlass.scaled_mm import Kernel, Problem

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def measures() -> bool:
    """Whether the user asked for max-autotune."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def is_plain(node: fx.Node) -> bool:
    """Whether it is a GEMM without a factor and with nothing added."""
    return node.target is ops.scaled_mm and all(more is None for more in node.args[7:])


def is_of_few_rows(node: fx.Node) -> bool:
    """Whether it is an FP8 GEMM that the kernel for few rows takes."""
    if node.target is not ops.scaled_mm or config.cpp_wrapper:
        return False
    a, _, b, _, _, gemm = node.args[:6]
    x, w = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    m = x.shape[0]
    most = small_m.at_most(lambda rows: statically_known_true(m <= rows) and statically_known_true(m > 0))
    return small_m.choose(x.device, most, w.shape, (x.dtype, w.dtype), gemm) is not None  # type: ignore[arg-type]


def scope_of(gemm: Gemm, k: int) -> str | None:
    """A `Problem`'s scope, of a GEMM with K elements; None where no table of CUTLASS's knows it: MXFP8 and NVFP4,
    square blocks on the left, scales of one block."""
    a, b = gemm.granularities
    if not gemm.blocked:
        return a.name
    blocks = -(-k // a.alignment)
    if gemm.microscaled or not a.one_row or blocks == 1:
        return None
    return BLOCK_1X128.name if blocks % BLOCK_SCALES else b.name  # as `eager._block_operand` spreads them


def kernel_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Kernel | None:
    """What the tuned table names for it, if anything; with `more` of a `Problem` to do, and that output (None: its
    own)."""
    problem = problem_of(gemm, out, **more)
    tile = None if problem is None else template.choose(problem)
    return None if tile is None else problem.kernel(tile)  # type: ignore[union-attr]


def problem_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Problem | None:
    """What that is for CUTLASS; None where it has no kernels."""
    a, _, b, _, bias, wanted, dtype = gemm.args[:7]
    x, w = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    sizes = (x.shape[0], w.shape[0], x.shape[1])
    arch = template.architecture(x.device) if x.device.type == "cuda" else None
    scope = scope_of(wanted, sizes[2]) if isinstance(sizes[2], int) else None  # type: ignore[arg-type]
    if arch is None or scope is None or not all(isinstance(size, int) for size in sizes):
        return None
    kind = (scope, bias is not None, wanted.fast_accum)  # type: ignore[union-attr]
    return Problem(arch, *sizes, x.dtype, w.dtype, out or dtype, *kind, **more)  # type: ignore[arg-type]
