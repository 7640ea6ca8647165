"""Models on several ranks: what goes between ranks in low precision."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_inductor.distributed.fsdp.all_gather import low_precision_all_gather as low_precision_all_gather

_HOME = {"low_precision_all_gather": "te_inductor.distributed.fsdp.all_gather"}

__all__ = ["low_precision_all_gather"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
