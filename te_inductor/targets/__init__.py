"""What a device can do: one file a family of GPUs, and one function that answers. No other module asks for a capability.

A device that is not here can be asked about by its name: passes that decide are told of it by `taken_for`, as
`explain(…, target="h100")` does.

To add a family: a file with `CAPABILITIES` and `target(capability, cuda)`, and its name in FAMILIES.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.errors import OptionError, unknown
from te_inductor.targets import cpu, sm89, sm90, sm100, sm120
from te_inductor.targets.target import Ability, Limits, Rates, Target, named

__all__ = [
    "Ability",
    "Limits",
    "Rates",
    "Target",
    "by_name",
    "multiprocessors",
    "of",
    "rates_in",
    "rates_of",
    "taken_for",
]

FAMILIES = (sm90, sm100, sm120)
_known: dict[torch.device, Target] = {}  # CUDA's, which are asked once
CUDA = "13.0"  # of a device that is not here, where torch is built without
# What `torch.cuda.get_device_properties` would say of devices that are asked about elsewhere, by their names.
PROPERTIES = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 50 * 2**20),
    "h200": ("NVIDIA H200", (9, 0), 132, 232448, 50 * 2**20),
    "b200": ("NVIDIA B200", (10, 0), 148, 232448, 126 * 2**20),
}
_instead: ContextVar[Target | None] = ContextVar("the device that any other is taken for", default=None)


def of(device: torch.device) -> Target:
    """What `device` can do. Devices that the package does not run on have a `refusal`."""
    if (instead := _instead.get()) is not None:
        return instead
    if device.type == "cpu":
        return cpu.TARGET
    if device.type != "cuda":
        return Target(device.type, refusal=Refusal("device type %s has no FP8 GEMM", device.type))
    if torch.version.hip is not None:  # torch calls AMD's GPUs "cuda" as well, and their numbers mean something else
        why = Refusal("an AMD GPU (ROCm %s), the kernels are for NVIDIA's", torch.version.hip)
        return Target(f"ROCm {torch.version.hip}", refusal=why)
    found = _known.get(device)
    if found is None:
        found = _of_nvidia(torch.cuda.get_device_properties(device), torch.version.cuda)
        if device.index is not None:  # else it is whichever is current
            _known[device] = found
    return found


def rates_of(device: torch.device) -> Rates | None:
    """The rates of GEMMs and casts on `device`; None where nothing was measured."""
    return rates_in(of(device))


def rates_in(target: Target) -> Rates | None:
    """The rates of a target, by its product."""
    return next((rates for rates in target.rates if target.product.startswith(rates.product)), None)


def by_name(name: str) -> Target:
    """What a device can do that need not be here, with the CUDA that torch was built for, else a current one.

    Raises:
        OptionError: no device has this name.
    """
    if name not in PROPERTIES:
        raise OptionError(unknown("target", name, PROPERTIES))
    return _of_nvidia(properties_of(name), torch.version.cuda or CUDA)


def properties_of(name: str) -> SimpleNamespace:
    """What torch would say of a device."""
    product, (major, minor), multiprocessors, shared_memory, l2 = PROPERTIES[name]
    return SimpleNamespace(
        name=product,
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared_memory,
        L2_cache_size=l2,
    )


@contextmanager
def taken_for(target: Target | None) -> Iterator[None]:
    """Has `of` answer with one target, whatever device it is asked about, in this context. For passes that decide and
    run nothing; None leaves devices what they are."""
    token = _instead.set(target)
    try:
        yield
    finally:
        _instead.reset(token)


def _of_nvidia(properties: Any, cuda: str | None) -> Target:
    """What the device's capability says, with the CUDA that torch was built with, and what it has itself."""
    capability = properties.major, properties.minor
    if capability < sm89.FIRST:
        why = Refusal("compute capability %d.%d has no FP8 tensor cores, 8.9 is the first", *capability)
        return Target(named(capability), capability, cuda, refusal=why)
    family = next((one for one in FAMILIES if capability in one.CAPABILITIES), sm89)
    limits = Limits(
        properties.multi_processor_count, properties.shared_memory_per_block_optin, properties.L2_cache_size
    )
    return replace(family.target(capability, cuda), product=properties.name, limits=limits)


def described(device: torch.device) -> str:
    """A CUDA device's name and capability, for people."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{product(device)} (compute capability {capability})"


def product(device: torch.device) -> str:
    """A CUDA device's name, by which tables of measurements are found."""
    return torch.cuda.get_device_name(device)


def cuda_version() -> str | None:
    """The version of the CUDA that torch was built for."""
    return torch.version.cuda


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has: `of`, for what is asked at each launch."""
    return of(device).limits.multiprocessors
