"""Inductor lowerings of the op set: IR only, one file an op. `install()` registers them, once a process."""

from collections.abc import Callable
from typing import Any

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.lowerings")


def install() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register every lowering with Inductor (importing the modules does it); returns the wrapper of its graph compiler."""
    from te_inductor.lowerings import quantize, scaled_mm  # noqa: F401
    from te_inductor.lowerings.tiles import with_tiles

    return with_tiles
