"""Graphs of which each process has something to say when it compiles them, that only their passes know. AOTAutograd's
cache would return one to another process without a word, and so keeps none of them. Inductor's keeps their code."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from te_inductor import compat

_UNKEPT = "te_inductor_unkept"  # in the metadata of a graph's module


def leave_out(gm: fx.GraphModule) -> None:
    """Has the cache keep no graph whose forward this is."""
    gm.meta[_UNKEPT] = True


def heeding(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a compiler of single graphs, Inductor's or one that calls it."""

    def compile(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        unkept = gm.meta.get(_UNKEPT, False)  # before Inductor changes it
        code = compile_graph(gm, inputs, **options)
        if unkept:
            compat.keep_out_of_graph_cache(code, "a pass has something to say of the graph")
        return code

    return compile
