"""Tensors whose contents torch exchanges."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from te_inductor.compat.patches import patch


def around_swaps(held: Callable[[Tensor, Tensor], AbstractContextManager[None]]) -> None:
    """Have `torch.utils.swap_tensors` run inside of ``held(t1, t2)`` from now on."""
    original = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        with held(t1, t2):
            original(t1, t2)

    patch("torch.utils.swap_tensors", swap_tensors)
