"""What a device can do: one file a family of GPUs, and one function that answers. No other module asks for a capability.

To add a family: a file with `CAPABILITIES` and `target(capability, cuda)`, and its name in FAMILIES.
"""

import functools

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.targets import cpu, sm89, sm90, sm100, sm120
from te_inductor.targets.target import Rates, Target, named

__all__ = ["Rates", "Target", "multiprocessors", "of", "rates_of"]

FAMILIES = (sm90, sm100, sm120)


def of(device: torch.device) -> Target:
    """What `device` can do. Devices that the package does not run on have a `refusal`."""
    if device.type == "cpu":
        return cpu.TARGET
    if device.type != "cuda":
        return Target(device.type, refusal=Refusal("device type %s has no FP8 GEMM", device.type))
    if torch.version.hip is not None:  # torch calls AMD's GPUs "cuda" as well, and their numbers mean something else
        why = Refusal("an AMD GPU (ROCm %s), the kernels are for NVIDIA's", torch.version.hip)
        return Target(f"ROCm {torch.version.hip}", refusal=why)
    return _of_nvidia(torch.cuda.get_device_capability(device), torch.version.cuda)


def rates_of(device: torch.device) -> Rates | None:
    """The rates of GEMMs and casts on `device`; None where nothing was measured."""
    return next((one for one in of(device).rates if product(device).startswith(one.product)), None)


@functools.cache
def _of_nvidia(capability: tuple[int, int], cuda: str | None) -> Target:
    """Its capability decides, and the CUDA that torch was built with."""
    if capability < sm89.FIRST:
        why = Refusal("compute capability %d.%d has no FP8 tensor cores, 8.9 is the first", *capability)
        return Target(named(capability), capability, cuda, refusal=why)
    family = next((one for one in FAMILIES if capability in one.CAPABILITIES), sm89)
    return family.target(capability, cuda)


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
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
