"""What a device can do: one file a family of GPUs, and one function that answers. No other module asks for a capability.

To add a family: a file with `CAPABILITIES` and `target(capability, cuda)`, and its name in FAMILIES.
"""

import functools
from dataclasses import replace
from typing import Any

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.targets import cpu, sm89, sm90, sm100, sm120
from te_inductor.targets.target import Limits, Rates, Target, named

__all__ = ["Limits", "Rates", "Target", "multiprocessors", "of", "rates_of"]

FAMILIES = (sm90, sm100, sm120)
_known: dict[torch.device, Target] = {}  # CUDA's, which are asked once


def of(device: torch.device) -> Target:
    """What `device` can do. Devices that the package does not run on have a `refusal`."""
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
    target = of(device)
    return next((rates for rates in target.rates if target.product.startswith(rates.product)), None)


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
