"""How the package's lowerings reach Inductor, and what happens when one of them fails.

A lowering turns one op of `ops.py` into Inductor IR. It is registered at the first compile, never at import. If it raises,
the op runs as its eager kernel instead and one warning says so: the next rung of the ladder.
"""

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from te_inductor.diagnostics import log
from te_inductor.errors import FallbackWarning


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `op`; on an exception lower to the op's eager kernel."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        eager = fallback_handler(op, add_to_fallback_set=False)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                log.debug("%s", traceback.format_exc())
                warnings.warn(
                    f"te_inductor: {op} runs in the eager runtime, because its lowering failed: "
                    f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}",
                    FallbackWarning,
                    stacklevel=2,
                )
                return eager(*args, **kwargs)

        return register_lowering(op, type_promotion_kind=None)(guarded)  # type: ignore[no-any-return]

    return decorate
