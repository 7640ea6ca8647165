"""What is done first in the backward of a graph that AOTAutograd has compiled."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from te_inductor.compat.dynamo import is_compiling

_BACKWARD, _VIEWS = "CompiledFunctionBackward", 4  # AOTAutograd's node; how many views at most are before it
_FIRST = "te_inductor_first"  # in such a node's metadata


def before_backward(outputs: Iterable[Any], first: Callable[[], None]) -> None:
    """Have each backward of the graph that made these outputs begin with this, whichever of them it comes from; not where
    compiled autograd runs it."""
    for node in {node for output in outputs if isinstance(output, Tensor) for node in _backward_of(output)}:
        if _FIRST not in node.metadata:
            node.metadata[_FIRST] = []
            node.register_prehook(_before_backward)
        node.metadata[_FIRST].append(first)


def _before_backward(grads: Any) -> None:
    """One function for all, as compiled autograd compiles hooks, each once; its trace leaves nothing of this one."""
    if not is_compiling():
        node: Any = torch._C._current_autograd_node()
        for first in node.metadata[_FIRST]:
            first()


def _backward_of(output: Tensor) -> Iterator[Any]:
    """AOTAutograd's, which may be behind those of views."""
    node = output.grad_fn
    for _ in range(_VIEWS):
        if node is None:
            return
        if node.name() == _BACKWARD:
            yield node
            return
        node = node.next_functions[0][0] if node.next_functions else None
