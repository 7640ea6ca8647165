"""Inductor: its entry, its autotuner, its sizes and its lowering of `cat`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_inductor.compat.patches import patch


def size_hint(sizevars: Any, size: Any) -> int:
    """A likely value of a size that Inductor knows by a symbol, without a guard."""
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint  # 2.13 renamed it
    return int(hint(size))


def autotune(name: str, choices: list[Any], nodes: list[Any], layout: Any) -> Any:
    """The result of the fastest of several choices, in Inductor's IR; from 2.13 Inductor returns the choice as well."""
    from torch._inductor.select_algorithm import autotune_select_algorithm

    found = autotune_select_algorithm(name, choices, nodes, layout)
    return found[0] if isinstance(found, tuple) else found


def concatenated(pieces: Sequence[Any], dim: int) -> Any:
    """Inductor's lowering of `aten.cat`, called by another op's: the graph's node is not the cat's."""
    from torch._inductor.lowering import lowerings

    with patch("torch._inductor.lowering._cat_inputs_recombine_reduction", lambda *_: None):
        return lowerings[torch.ops.aten.cat](pieces, dim)


def compile_fx(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    region: str | None = None,
    wrap_inner: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
) -> Any:
    """Inductor's `compile_fx`, its compiler of single graphs wrapped; 2.13 and later can name the compiled region."""
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    named: dict[str, Any] = {"compile_region_name": region} if region is not None else {}
    if named and "compile_region_name" not in inspect.signature(inductor).parameters:
        named = {}
    return inductor(gm, inputs, wrap_inner(compile_fx_inner), config_patches=dict(patches), **named)
