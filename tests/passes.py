"""The backend without one of its passes, for tests of what that pass does."""

from collections.abc import Callable
from types import ModuleType
from typing import Any


def leave_out(monkeypatch: Any, stage: ModuleType, one: Callable[..., Any], instead: Any = None) -> None:
    """Take a pass out of `joint` or `post_grad`, or put another in its place."""
    found = [step for step in stage.PASSES if getattr(step, "__wrapped__", step) is one]
    assert len(found) == 1
    passes = [instead if step is found[0] else step for step in stage.PASSES]
    monkeypatch.setattr(stage, "PASSES", tuple(step for step in passes if step is not None))
