"""How the package's ops are registered with torch."""

from typing import Any

import torch

# A module-level reference keeps the registrations alive.
library = torch.library.Library("te_inductor", "DEF")
WRITTEN_OUT: dict[Any, Any] = {}  # of each primitive, what it computes in ATen ops that can be traced


def implement_on_cuda(op: Any, implementation: Any) -> None:
    """Give an op that `define` made another kernel for CUDA tensors."""
    library.impl(op._schema.name.partition("::")[2], implementation, "CUDA")


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
    return op
