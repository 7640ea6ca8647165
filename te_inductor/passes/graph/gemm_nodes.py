"""GEMMs of a graph behind autograd, for the passes that give one more to do."""

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.templates import small_m
from te_inductor.templates.cutlass.scaled_mm import Kernel
from te_inductor.templates.select import Problem, select

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_plain(node: fx.Node) -> bool:
    """Whether it is a GEMM without a factor and with nothing added."""
    return node.target is ops.scaled_mm and all(more is None for more in node.args[7:])


def problem_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Problem:
    """What a GEMM computes; with `more` of a `Problem` to do, and that output (None: its own)."""
    a, _, b, _, bias, wanted, dtype = gemm.args[:7]
    x, w = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    m, packed = x.shape[0], wanted.packed  # type: ignore[union-attr]
    sizes = (size if isinstance(size, int) else None for size in (m, w.shape[0], x.shape[1] * packed))
    at_most = small_m.at_most(lambda rows: statically_known_true(m <= rows) and statically_known_true(m > 0))
    autotunes = bool(config.max_autotune or config.max_autotune_gemm)
    more |= {"bias": bias is not None, "at_most": at_most, "autotunes": autotunes, "cpp_wrapper": config.cpp_wrapper}
    known = dict(zip(("m", "n", "k"), sizes, strict=True))
    return Problem(x.device, a=x.dtype, b=w.dtype, out=out or dtype, gemm=wanted, **known, **more)  # type: ignore[arg-type]


def kernel_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Kernel | None:
    """CUTLASS's kernel that is chosen for it, if one is, with `more` to do."""
    return select(problem_of(gemm, out, **more)).kernel
