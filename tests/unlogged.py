"""What torch does for its logs alone, left out of the tests' processes: a tenth of what tests that compile cost.

Guards are timed with the processor's caches flushed, 24 ms a graph. Each graph is printed several times, and each fake
mode reads the sources of its stack. Who sets TORCH_LOGS or TORCH_TRACE gets all of it.
"""

import os
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock


def patches() -> list[Any]:
    """Patches of torch; none where somebody reads its logs."""
    if "TORCH_LOGS" in os.environ or "TORCH_TRACE" in os.environ:
        return []
    from torch import fx
    from torch._dynamo import guards
    from torch._subclasses import fake_tensor

    readable = fx.GraphModule.print_readable

    def print_readable(graph: fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        return readable(graph, True, *args, **kwargs) if print_output else ""

    without_stacks = SimpleNamespace(extract_stack=traceback.StackSummary, format_list=traceback.format_list)
    return [
        mock.patch.object(guards, "profile_guard_manager", lambda *arguments: 0.0),
        mock.patch.object(fx.GraphModule, "print_readable", print_readable),
        mock.patch.object(fake_tensor, "traceback", without_stacks),
    ]
