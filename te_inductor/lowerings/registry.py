"""How the package's lowerings reach Inductor, and what happens when one of them fails.

A lowering turns one op of `ops.py` into Inductor IR. It is registered at the first compile, never at import. If it
raises, the op runs as its eager kernel instead, the next rung of the ladder; the compile says so once.

# Note [Lowerings that write]
A lowering that fails leaves in Inductor's graph what it has done so far. Of an op without side effects that is dead
code. Of an op that writes it may be a write, and the eager kernel would write again: a gradient would be added twice.
Inductor cannot take operations back, since their number is part of the names of those that follow, and other tensors
may already share their buffers. So such a failure ends the compile of that graph, forward or backward, and the graph is
compiled once more from a copy that was set aside, with the op's eager kernel from the start."""

import copy
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from te_inductor.diagnostics import log, say


@dataclass
class _Failures:
    """The failures of the graph that is being compiled."""

    causes: dict[str, str] = field(default_factory=dict)  # by the op's name, the traceback of its first failure
    eager: set[str] = field(default_factory=set)  # ops that write, and are not lowered any more


_failures: ContextVar[_Failures | None] = ContextVar("failed lowerings", default=None)
_writing: set[Any] = set()  # ops with a lowering that change a tensor


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `op`; on an exception lower to the op's eager kernel."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        eager, name = fallback_handler(op, add_to_fallback_set=False), str(op)
        if op._schema.is_mutable:
            _writing.add(op)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            failures = _failures.get()
            if failures is not None and name in failures.eager:
                return eager(*args, **kwargs)
            try:
                return function(*map(_as_tensor, args), **kwargs)
            except Exception:
                log.debug("%s", traceback.format_exc())
                if failures is None:  # not our compile, nobody would hear of it
                    raise
                failures.causes.setdefault(name, traceback.format_exc(limit=-3))
                if op in _writing:
                    failures.eager.add(name)
                    raise
                return eager(*args, **kwargs)

        return register_lowering(op, type_promotion_kind=None)(guarded)

    return decorate


def may_give_up(op: Any) -> None:
    """Have graphs that hold `op` be set aside, as its kernel may turn out, when code is generated, not to be possible."""
    _writing.add(op)


def give_up(name: str, why: str) -> NoReturn:
    """End the compile of this graph. It is compiled once more, with the eager kernel of the op of that name.

    Raises:
        RuntimeError: always.
    """
    failures = _failures.get()
    if failures is not None:
        failures.causes.setdefault(name, f"    {why}")
        failures.eager.add(name)
    raise RuntimeError(f"{name}: {why}")


def _as_tensor(argument: Any) -> Any:
    """What Inductor has folded to a number, such as a stored weight's scale in AOTInductor, a tensor again."""
    if not isinstance(argument, ir.Constant):
        return argument
    return lowerings[torch.ops.aten.full]([], argument.value, dtype=argument.dtype, device=argument.device)


@contextmanager
def _failures_said(fallback: str) -> Iterator[_Failures]:
    failures = _Failures()
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)
    if failures.causes:
        causes = "\n".join(f"  {op}:\n{cause}" for op, cause in failures.causes.items())
        say(f"te_inductor: ops that run in the eager runtime, because their lowering failed:\n{causes}", fallback)


def compile_guarded(
    compile_graph: Callable[..., Any], fallback: str, gm: fx.GraphModule, *args: Any, **kwargs: Any
) -> Any:
    """Compile one graph; again where a lowering of an op that writes has failed: Note [Lowerings that write]. Says
    which ops run in the eager runtime, as `options["fallback"]` wants it said.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    with _failures_said(fallback) as failures:
        while True:
            known = len(failures.eager)
            spare = _set_aside(gm)
            # The key knows nothing of failures: another process would take the code without a word.
            cached = {} if known == 0 else {"fx_graph_cache": False, "fx_graph_remote_cache": False}
            try:
                with config.patch(cached):
                    return compile_graph(gm, *args, **kwargs)
            except Exception:
                if len(failures.eager) == known:
                    raise
            for module, graph in spare.items():
                module.graph = graph  # recompiles the module


def _set_aside(gm: fx.GraphModule) -> dict[fx.GraphModule, fx.Graph]:
    """Copies of its graphs, which Inductor's passes change; none where no op of ours writes."""
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    if not any(_writes(node) for module in modules for node in module.graph.nodes):
        return {}
    return {module: copy.deepcopy(module.graph) for module in modules}


def _writes(node: fx.Node) -> bool:
    """Whether it calls an op of `_writing`, by itself or as AOTAutograd has made it functional."""
    functional = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.target in _writing or (functional and any(arg in _writing for arg in node.args[:1]))
