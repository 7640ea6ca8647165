"""The memory that a generated training step takes, without a device: its wrappers run on tensors that have no memory, and
its kernels not at all. What is allocated and let go, and when, is what the wrappers do on a GPU.

Counted are storages that a graph makes: not its inputs, which are parameters, state and a batch."""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_inductor.ops  # noqa: F401  which generated code calls

# What of a wrapper needs a device, or checks what it is given, and what stands there instead.
ON_META = {
    r"^empty_strided_cuda = .*$": "from tests.offline.liveness import empty as empty_strided_cuda",
    r"^reinterpret_tensor = .*$": "reinterpret_tensor = torch.as_strided",
    r"^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream$": "get_raw_stream = lambda device: 0",
    r"with torch\.cuda\._DeviceGuard\(0\):": "if True:",
    r"torch\.cuda\.set_device\(0\)": "pass",
    r"async_compile = AsyncCompile\(\)": "from tests.offline.liveness import Kernels; async_compile = Kernels()",
    r"^from torch\._inductor\.select_algorithm import extern_kernels$": (
        "from tests.offline.liveness import Gemms; extern_kernels = Gemms()"
    ),
    r"from torch\._dynamo\.testing import rand_strided": "from tests.offline.liveness import empty_as as rand_strided",
    r"assert_(size_stride|alignment)\(.*": "pass",
    r"copy_if_misaligned\(": "(",
    r"device='cuda:0'|device\(type='cuda', index=0\)": "device='meta'",
}


@dataclass
class Peaks:
    """Bytes."""

    forward: int
    saved: int  # from the forward to the backward
    backward: int  # with what was saved and the gradients, that of the output too


@dataclass
class Storages(TorchDispatchMode):
    """The storages that are alive, and the most that they were."""

    alive: list[tuple[StorageWeakRef, int]] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        known = given | {ref.cdata for ref, _ in self.alive if not ref.expired()}
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and _key(one) not in known:
                self.alive.append((StorageWeakRef(one.untyped_storage()), one.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.now())
        return found

    def now(self) -> int:
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        return sum(size for _, size in self.alive)


class Kernels:
    """Stands where Inductor's AsyncCompile stands, and where its kernels do."""

    def triton(self, name: str, source: str, **settings: Any) -> "Kernels":
        return self

    def wait(self, scope: Any) -> None:
        pass

    def run(self, *arguments: Any, **settings: Any) -> None:
        pass


class Gemms:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: more["out"]


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def empty_as(size: Sequence[int], stride: Sequence[int], device: Any, dtype: torch.dtype) -> Tensor:
    return empty(size, stride, dtype)


def peaks(sources: Sequence[str]) -> Peaks:
    """The peaks of a forward and its backward."""
    forward, backward = (_load(source) for source in sources)
    _, given = _names(sources[0]), _names(sources[1])
    saved_count = sum("tangents" not in name for name in given)
    inputs = forward.get_args()
    with Storages() as storages:
        returned = list(forward.call(list(inputs)))
        of_forward = storages.peak
        arguments = returned[len(returned) - saved_count :]
        del returned
        saved = storages.now()
        arguments += backward.get_args()[saved_count:]
        storages.peak = 0  # which counted all that `get_args` makes
        gradients = backward.call(arguments)
        del gradients
    return Peaks(of_forward, saved, storages.peak)


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _names(source: str) -> list[str]:
    """The names of the arguments of a wrapper."""
    found = re.search(r"def call\(self, args\):\n\s+(.*?),? = args", source)
    assert found is not None
    return found[1].split(", ")


def _load(source: str) -> ModuleType:
    for found, mended in ON_META.items():
        source = re.sub(found, mended, source, flags=re.MULTILINE)
    module = ModuleType("wrapper")
    for name in set(re.findall(r"\bte_inductor_\w+", source)):  # our constants, called by module and class
        path, _, kind = name.rpartition("_")
        for owner in [one for one in sys.modules if one.replace(".", "_") == path]:
            setattr(module, name, getattr(importlib.import_module(owner), kind, None))
    exec(compile(source, "wrapper", "exec"), module.__dict__)
    return module
