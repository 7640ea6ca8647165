"""CUTLASS kernels of ours run on the device that their tensors are on, whichever device is current; Triton's do so by
their launcher (templates/triton/launcher.py)."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class OnADevice(Protocol):
    @property
    def device(self) -> torch.device: ...


T = TypeVar("T", bound=OnADevice)


def launches(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorator of every function that launches a kernel: while it runs, its first argument's device is current."""

    @functools.wraps(function)
    def on_its_device(first: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = first.device
        if device.type != "cuda" or torch.cuda.current_device() == device.index:
            return function(first, *args, **kwargs)
        with torch.cuda.device(device):
            return function(first, *args, **kwargs)

    return on_its_device
