"""Layers of ours as ATen ops, for programs that leave this process.

A layer in an exported program is one op whose constants are text (`fp8_weight`, `nvfp4_weight_only`,
`exported_linears`, `exported_grouped_linears`), so that `torch.export.save` can write it. It is traced through in two
places that have to do without the primitives it is made of:

- `run_decompositions()`: the primitives' constants are Python objects, which no saved program can hold. All of them are
  written out by their eager forms, which are plain torch: casts bit for bit the same, GEMMs up to the order of sums.
- AOTInductor: a primitive that Inductor has no code for would be called in the loading process, by name. Those alone are
  written out; the others have lowerings.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_inductor import compat
from te_inductor.runtime.definition import WRITTEN_OUT

_called: dict[Any, Callable[..., bool]] = {}  # primitives that Inductor calls by name, and for which arguments


def is_called(*ops: Any, where: Callable[..., bool] = lambda *args, **kwargs: True) -> None:
    """Note primitives that Inductor calls by name, with the arguments for which `where` is true."""
    _called.update(dict.fromkeys(ops, where))


class _WrittenOut(TorchDispatchMode):
    def __init__(self, everything: bool) -> None:
        super().__init__()
        self.everything = everything

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written_out = op in WRITTEN_OUT if self.everything else op in _called and _called[op](*args, **kwargs)
        return (WRITTEN_OUT[op] if written_out else op)(*args, **kwargs)


def leaves(op: Any) -> bool:
    """Whether a layer that is traced now is part of a program that leaves this process: then nothing may be asked of a
    symbolic size, as no guard would hold it to the answer."""
    return compat.is_decomposed_by_export(op) or torch.compiler.is_exporting()


def for_program(op: Any) -> AbstractContextManager[Any]:
    """What to trace the layer `op` in."""
    if compat.is_decomposed_by_export(op):
        return _WrittenOut(everything=True)
    if not torch.compiler.is_exporting():
        return nullcontext()
    for prepare in compat.before_lowering:
        prepare()
    return _WrittenOut(everything=False)
