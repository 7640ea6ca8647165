"""What the package knows of a fused kernel, in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

JOINT, POST_GRAD = "joint", "post_grad"


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that does what a graph has several operators for. Its source is in templates/, and `kernels.select` says
    where it pays."""

    stages: tuple[str, ...]  # on whose graphs `fold` runs
    fold: Callable[[fx.Graph], None]  # puts the kernel in the place of what it computes
    op: Any = None  # what the graph calls, with its eager form and its fake; None: `fold` gives another op an argument
    lower: Callable[..., Any] | None = None  # the op's lowering to Inductor's IR
