"""What torch does for its logs, or again and again, left out of the tests' processes: a tenth of what tests that compile
cost, a fourth of those that generate code.

Guards are timed with the processor's caches flushed, 24 ms a graph. Each graph is printed several times, and each fake
mode reads the sources of its stack. Who sets TORCH_LOGS or TORCH_TRACE gets all of it.

Inductor makes its one handler of dtypes anew for each op that it writes. For C++ it asks sympy to simplify each index,
50 ms of it, also the sums of products in which nothing is to be simplified.
"""

import functools
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
    from torch._inductor import sizevars
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._subclasses import fake_tensor

    def printed(readable: Any) -> Any:
        def print_readable(graph: fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
            return readable(graph, True, *args, **kwargs) if print_output else ""

        return print_readable

    def once(handler: Any) -> Any:
        return lambda self: None if vars(self) else handler(self)

    def only_quotients(simplified: Any) -> Any:
        @functools.lru_cache
        def simplify_index_in_vec_range(index: Any, var: Any, vec_length: int) -> Any:
            return index if index.is_polynomial(*index.free_symbols) else simplified(index, var, vec_length)

        return simplify_index_in_vec_range

    without_stacks = SimpleNamespace(extract_stack=traceback.StackSummary, format_list=traceback.format_list)
    replacements: list[tuple[Any, str, Any]] = [
        (guards, "profile_guard_manager", lambda _: lambda *arguments: 0.0),
        (fx.GraphModule, "print_readable", printed),
        (fake_tensor, "traceback", lambda _: without_stacks),
        (DtypePropagationOpsHandler, "__init__", once),
        (sizevars, "simplify_index_in_vec_range", only_quotients),
    ]
    return [  # each is of some versions of torch
        mock.patch.object(owner, name, make(getattr(owner, name)))
        for owner, name, make in replacements
        if hasattr(owner, name)
    ]
