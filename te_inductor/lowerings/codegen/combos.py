"""Kernels that Inductor writes into one: those of an op over a list of tensors (`torch._foreach_mul`), and, under its option
`combo_kernels`, any that do not depend on each other.

It asks nobody for the tiles of such parts, and cuts all of them alike. So what needs a tile of ours is no part: a cast
both ways, the sums of columns, blocks, rows that are summed in one order (`Choices.stands_alone`)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._inductor.virtualized import V

from te_inductor import compat


def combined_without_ours() -> AbstractContextManager[Any]:
    """Have Inductor combine only kernels that do not stand alone while this context holds."""
    theirs = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    return compat.patch(
        "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels",
        functools.partial(_groups, theirs),
    )


def _groups(theirs: Callable[[Any], list[list[Any]]], scheduler: Any) -> list[list[Any]]:
    groups, stands_alone = theirs(scheduler), getattr(V.choices, "stands_alone", None)
    if stands_alone is None:  # another thread's compile, which is not ours
        return groups
    return [[node for node in group if not stands_alone(node)] for group in groups]


def is_part(scheduler: Any, node: Any) -> bool:
    """Whether a scheduler node is one of several whose kernels are written into one."""
    return bool(scheduler.name_to_fused_node[node.get_first_name()].is_foreach())
