"""How the package's ops are registered with torch."""

import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name

# A module-level reference keeps the registrations alive.
library = torch.library.Library("te_inductor", "DEF")
WRITTEN_OUT: dict[Any, Any] = {}  # of each primitive, what it computes in ATen ops that can be traced
_TYPES = {
    Tensor: "Tensor",
    torch.dtype: "ScalarType",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    int | torch.SymInt: "SymInt",
    type(None): "()",
    None: "()",
}


class Kernels:
    """The primitives' kernels for one kind of device, each by the name of its op."""

    def __init__(self, others: "Kernels | None" = None) -> None:
        self._others = others  # the kernels of primitives that have none for this kind of device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._others is None:
            raise AttributeError(name)
        return getattr(self._others, name)


_EVERYWHERE = Kernels()
KERNELS = {"cpu": _EVERYWHERE, "cuda": Kernels(_EVERYWHERE)}


def implement_on_cuda(**kernels: Callable[..., Any]) -> None:
    """Gives ops, by their names, other kernels for CUDA tensors."""
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CUDA")
        setattr(KERNELS["cuda"], name, kernel)


def define(
    schema: str, implementation: Any, fake: Any = None, written_out: Any = None, tags: tuple[torch.Tag, ...] = ()
) -> Any:
    """Define an op; with `fake` it is a primitive of the graph, without it is traced through. `written_out` is what
    stands for a primitive in programs that leave the process, where `implementation` cannot be traced."""
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, implementation, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
    op = getattr(torch.ops.te_inductor, name).default
    if fake is not None:
        torch.library.register_fake(f"te_inductor::{name}", fake, lib=library)
        WRITTEN_OUT[op] = written_out or implementation
        setattr(_EVERYWHERE, name, implementation)
    return op


def op_of(
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    written_out: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define the op that a function computes, with the function's signature for a schema; `name` where it is another
    than the function's. An argument that is written is annotated `Written`, a size `int | torch.SymInt`."""
    return define(f"{name or function.__name__}{schema_of(function)}", function, fake, written_out, tags)


def schema_of(function: Callable[..., Any]) -> str:
    """The arguments and the result of a function, as a schema has them."""
    signature, letters = inspect.signature(function), itertools.count(ord("a"))
    arguments = [
        f"{_type(one.annotation, letters)} {one.name}{'' if one.default is one.empty else f'={one.default}'}"
        for one in signature.parameters.values()
    ]
    return f"({', '.join(arguments)}) -> {_type(signature.return_annotation, letters)}"


def _type(annotation: Any, letters: Iterator[int]) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"Tensor({chr(next(letters))}!)"
    if origin in (Union, types.UnionType):
        [wanted] = [one for one in inner if one is not type(None)]
        return f"{_type(wanted, letters)}?"
    if origin is tuple:
        return f"({', '.join(_type(one, letters) for one in inner)})"
    if origin in (list, Sequence):
        return f"{_type(inner[0], letters)}[]"
    return constant_type_name(annotation)
