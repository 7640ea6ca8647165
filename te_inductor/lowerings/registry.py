"""How the package's lowerings reach Inductor, and what happens when one of them fails.

A lowering turns one op of `ops.py` into Inductor IR. It is registered at the first compile, never at import. If it raises,
the op runs as its eager kernel instead, the next rung of the ladder; the compile says so once.
"""

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from te_inductor.diagnostics import log, say

# The lowerings that failed in the graph being compiled: the op's name, and the traceback of its first failure.
_failed: ContextVar[dict[str, str] | None] = ContextVar("failed lowerings", default=None)


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `op`; on an exception lower to the op's eager kernel."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        eager = fallback_handler(op, add_to_fallback_set=False)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                log.debug("%s", traceback.format_exc())
                failed = _failed.get()
                if failed is None:  # not our compile, nobody would hear of it
                    raise
                failed.setdefault(str(op), traceback.format_exc(limit=-3))
                return eager(*args, **kwargs)

        return register_lowering(op, type_promotion_kind=None)(guarded)

    return decorate


@contextmanager
def failures_said(fallback: str) -> Iterator[None]:
    """Around the compile of one graph: say which ops run in the eager runtime, as `options["fallback"]` wants it said.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    failed: dict[str, str] = {}
    token = _failed.set(failed)
    try:
        yield
    finally:
        _failed.reset(token)
    if failed:
        causes = "\n".join(f"  {op}:\n{cause}" for op, cause in failed.items())
        say(f"te_inductor: ops that run in the eager runtime, because their lowering failed:\n{causes}", fallback)
