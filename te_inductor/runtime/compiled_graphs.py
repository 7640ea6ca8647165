"""Reports of the graphs that this process has compiled, and which of them ran in a call.

Dynamo calls each graph by a compile id, `0/0`, and a profiler finds that id wherever the graph runs: so nothing is
added to a call. What is kept is a report for each graph until `torch._dynamo.reset()`; parameters are not kept alive.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from te_inductor.errors import TEInductorError
from te_inductor.presentation.report import Report
from te_inductor.tensor_tables import TensorReference

_REGION = "Torch-Compiled Region: "  # what Dynamo calls a graph's run, before the compile id


@dataclass(frozen=True)
class CompiledGraph:
    """What a graph does, and the parameters that its sites had when it was compiled, by the sites' module paths."""

    report: Report
    weights: Mapping[str, TensorReference]


_graphs: dict[str, list[CompiledGraph]] = {}  # by compile id; several where DDP cuts a graph


def note(report: Report, weights: Mapping[str, nn.Parameter]) -> None:
    """Called by the backend, of the graph that it has compiled."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    if compile_id is None:  # something other than Dynamo called the backend
        return
    known = _graphs.setdefault(str(compile_id), [])
    if all(one.report != report for one in known):  # a restarted trace compiles a graph again
        known.append(CompiledGraph(report, {fqn: TensorReference(weight) for fqn, weight in weights.items()}))


def forget() -> None:
    """Dynamo starts its compile ids anew."""
    _graphs.clear()


@contextmanager
def ran() -> Iterator[list[CompiledGraph]]:
    """Collect the graphs of this backend that run in this context; the list is filled at its end.

    Raises:
        TEInductorError: a profiler runs already, which another one would end.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise TEInductorError(
            "which graphs run is found by torch's profiler, which is in use, expected a call outside of it"
        )
    found: list[CompiledGraph] = []
    with torch.autograd.profiler.profile() as profiler:
        yield found
    events = profiler.function_events or []
    names = dict.fromkeys(event.name.removeprefix(_REGION) for event in events if event.name.startswith(_REGION))
    found.extend(graph for name in names for graph in _graphs.get(name, ()))
