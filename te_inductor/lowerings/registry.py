"""How the package's lowerings reach Inductor, and what happens when one of them fails.

A lowering turns one op of `ops.py` into Inductor IR. It is registered at the first compile, never at import. If it
raises, the op runs as its eager kernel instead, the next rung of the ladder; the compile says so once.

# Note [Lowerings that fail]
A lowering that fails leaves in Inductor's graph what it has done so far. Of an op that writes that may be a write, and
the eager kernel would write again: a gradient would be added twice. Inductor cannot take operations back, since their
number is part of the names of those that follow, and other tensors may already share their buffers. Nor would a graph
that was finished with the eager kernel tell a later process, which finds it in a cache, that a lowering failed. So a
failure ends the compile of that graph, forward or backward, and the graph is compiled once more from a copy that was set
aside, with the op's eager kernel from the start, and without the caches."""

import copy
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from te_inductor.diagnostics import log, say

# The failures of the graph that is being compiled: by the op's name, the traceback.
_failures: ContextVar[dict[str, str] | None] = ContextVar("failed lowerings", default=None)


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `op`; on an exception the graph is compiled anew, with the op's
    eager kernel."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        eager, name = fallback_handler(op, add_to_fallback_set=False), str(op)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            failures = _failures.get()
            if failures is not None and name in failures:
                return eager(*args, **kwargs)
            try:
                return function(*map(_as_tensor, args), **kwargs)
            except Exception:
                log.debug("%s", traceback.format_exc())
                if failures is not None:  # else it is not our compile, and nobody would hear of it
                    failures.setdefault(name, traceback.format_exc(limit=-3))
                raise

        return register_lowering(op, type_promotion_kind=None)(guarded)

    return decorate


def give_up(name: str, why: str) -> NoReturn:
    """End the compile of this graph. It is compiled once more, with the eager kernel of the op of that name.

    Raises:
        RuntimeError: always.
    """
    failures = _failures.get()
    if failures is not None:
        failures.setdefault(name, f"    {why}")
    raise RuntimeError(f"{name}: {why}")


def _as_tensor(argument: Any) -> Any:
    """What Inductor has folded to a number, such as a stored weight's scale in AOTInductor, a tensor again."""
    if not isinstance(argument, ir.Constant):
        return argument
    return lowerings[torch.ops.aten.full]([], argument.value, dtype=argument.dtype, device=argument.device)


@contextmanager
def _failures_said(fallback: str) -> Iterator[dict[str, str]]:
    failures: dict[str, str] = {}
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)
    if failures:
        causes = "\n".join(f"  {op}:\n{cause}" for op, cause in failures.items())
        say(f"te_inductor: ops that run in the eager runtime, because their lowering failed:\n{causes}", fallback)


def compile_guarded(
    compile_graph: Callable[..., Any], fallback: str, gm: fx.GraphModule, *args: Any, **kwargs: Any
) -> Any:
    """Compile one graph; again where a lowering has failed: Note [Lowerings that fail]. Says which ops run in the eager
    runtime, as `options["fallback"]` wants it said.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    with _failures_said(fallback) as failures:
        while True:
            known = len(failures)
            spare = _set_aside(gm)
            # The key knows nothing of failures: another process would take the code without a word.
            cached = {} if known == 0 else {"fx_graph_cache": False, "fx_graph_remote_cache": False}
            try:
                with config.patch(cached):
                    return compile_graph(gm, *args, **kwargs)
            except Exception:
                if len(failures) == known:
                    raise
            for module, graph in spare.items():
                module.graph = graph  # recompiles the module


def _set_aside(gm: fx.GraphModule) -> dict[fx.GraphModule, fx.Graph]:
    """Copies of its graphs, which Inductor's passes change; none where no op is ours."""
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    if not any(_is_ours(node) for module in modules for node in module.graph.nodes):
        return {}
    return {module: copy.deepcopy(module.graph) for module in modules}


def _is_ours(node: fx.Node) -> bool:
    """Whether it calls an op of ours, by itself or as AOTAutograd has made it functional."""
    functional = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    called = node.args[0] if functional and node.args else node.target
    return isinstance(called, torch._ops.OpOverload) and called.namespace == "te_inductor"
