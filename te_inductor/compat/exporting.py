"""torch.export."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_inductor.compat.patches import patch

before_lowering: list[Callable[[], object]] = []  # called where torch.export or AOTInductor traces a layer of ours


def before_export(note: Callable[[object], None]) -> None:
    """Call `note` with each model that `torch.export` is about to trace."""
    from torch.export import _trace

    original = _trace._export

    @functools.wraps(original)
    def noted(mod: Any, *args: Any, **kwargs: Any) -> Any:
        note(mod)
        return original(mod, *args, **kwargs)

    patch("torch.export._trace._export", noted)


def is_decomposed_by_export(op: Any) -> bool:
    """Whether `ExportedProgram.run_decompositions` traces through `op`, a composite op of ours: while it does, it gives
    each such op a Python kernel (torch.export.exported_program._override_composite_implicit_decomp)."""
    return torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels
