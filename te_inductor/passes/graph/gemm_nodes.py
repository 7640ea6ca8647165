"""GEMMs of a graph behind autograd, for the passes that give one more to do."""

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops, targets
from te_inductor.kernels import fp8_small_m
from te_inductor.kernels.cutlass_tiles import Kernel
from te_inductor.kernels.problem import Epilogue, Problem, Program, Sizes
from te_inductor.kernels.select import select

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_plain(node: fx.Node) -> bool:
    """Whether it is a GEMM without a factor and with nothing added."""
    return node.target is ops.scaled_mm and all(more is None for more in node.args[7:])


def problem_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Problem:
    """What a GEMM computes; with `more` of an `Epilogue` to do, and that output (None: its own)."""
    a, _, b, _, bias, wanted, dtype = gemm.args[:7]
    x, w = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    rows, packed = x.shape[0], wanted.packed  # type: ignore[union-attr]
    m, n, k = (size if isinstance(size, int) else None for size in (rows, w.shape[0], x.shape[1] * packed))
    at_most = fp8_small_m.at_most(lambda most: statically_known_true(rows <= most) and statically_known_true(rows > 0))
    program = Program(bool(config.max_autotune or config.max_autotune_gemm), bool(config.cpp_wrapper))
    sizes, epilogue = Sizes(m, n, k, at_most=at_most), Epilogue(bias is not None, **more)
    return Problem(targets.of(x.device), sizes, wanted, out or dtype, epilogue, program)  # type: ignore[arg-type]


def kernel_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Kernel | None:
    """CUTLASS's kernel that is chosen for it, if one is, with `more` to do."""
    return select(problem_of(gemm, out, **more)).kernel
