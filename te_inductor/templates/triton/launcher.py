"""How kernels of Triton's are launched: on the device of their tensors, and without repeating what Triton found out before.

`kernel[grid](...)` launches on the current device, as PyTorch's ops do not, and at each call binds names, specializes
values, hashes options and compares globals, which takes the host longer than the launch. A `Launcher` keeps what Triton
compiled and calls it again. Which compiled kernel arguments need is decided by what Triton looks at: dtypes, whether
addresses and integers are multiples of 16, whether integers are one, and how many bits hold them."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from te_inductor.errors import LaunchError

ALIGNED = 16  # bytes, and what an integer is a multiple of
MOST_PROGRAMS = 2**31 - 1  # of a grid's first axis; the others hold 65,535, which no kernel uses


class Launcher:
    """One kernel with one set of constants and options: made once, and called with the other arguments, by position.

    A grid has one axis. A kernel whose tiles have more dimensions finds its tile from the program's number: the other axes
    of CUDA's grids hold too few programs for the rows of large models' experts."""

    __slots__ = ("_compiled", "_kernel", "_named", "_values", "constants")

    def __init__(self, kernel: Any, /, **named: Any) -> None:
        """`named` are all constants, by the kernel's names, which stand behind its other arguments, and Triton's options."""
        constants = [name for name in kernel.arg_names if name in named]
        wanted = [parameter.name for parameter in getattr(kernel, "params", ()) if parameter.is_constexpr]
        if wanted not in ([], constants) or constants != kernel.arg_names[len(kernel.arg_names) - len(constants) :]:
            # Given by position, a constant would be looked at as an integer, of which two values can share a kernel.
            raise TypeError(
                f"constants {constants} of a kernel with {kernel.arg_names}, expected {wanted}, behind all others"
            )
        self._kernel, self._named = kernel, named
        self.constants = {name: named[name] for name in constants}
        self._values = tuple(self.constants.values())
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, programs: int, *arguments: Any, on: torch.device | None = None) -> None:
        """Launches on the current stream of `on`, by default the device of the first argument, a tensor or a descriptor
        of one."""
        if programs > MOST_PROGRAMS:
            raise LaunchError(too_many(self._kernel.__name__, programs, arguments))
        if on is None:
            on = (arguments[0] if isinstance(arguments[0], Tensor) else arguments[0].base).device
        if on.type != "cuda":  # Triton's interpreter
            self._kernel[(programs,)](*arguments, **self._named)
        elif on.index == torch._C._cuda_getDevice():
            self._launch(programs, arguments, on.index)
        else:
            with torch.cuda.device(on):
                self._launch(programs, arguments, on.index)

    def _launch(self, programs: int, arguments: tuple[Any, ...], device: int) -> None:
        key = (device, *[specialized(argument) for argument in arguments])
        compiled, grid = self._compiled.get(key), (programs,)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*arguments, **self._named)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        runtime, values = triton.knobs.runtime, (*arguments, *self._values)
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            compiled.launch_metadata(grid, stream, *values), runtime.launch_enter_hook, runtime.launch_exit_hook, *values,
        )  # fmt: skip


def too_many(kernel: str, programs: int, arguments: tuple[Any, ...]) -> str:
    """What a `LaunchError` says."""
    given = (getattr(argument, "base", argument) for argument in arguments)
    sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given if isinstance(tensor, Tensor))
    return (
        f"kernel {kernel} of tensors of sizes {sizes} wants {programs:,} programs, expected at most {MOST_PROGRAMS:,},"
        " which is CUDA's limit; give it its rows in several calls"
    )


def specialized(value: Any) -> Any:
    """What Triton compiles for of an argument: two of which it is equal can have one compiled kernel."""
    kind = type(value)
    if kind is int:
        bits = 4 * (not -(2**31) <= value < 2**31) + 8 * (value >= 2**63)
        return (value % ALIGNED == 0) + 2 * (value == 1) + bits
    if kind is Tensor or isinstance(value, Tensor):
        return value.dtype if value.data_ptr() % ALIGNED == 0 else (value.dtype,)
    if value is None or kind is float:
        return kind
    return (kind, value.base.dtype, *value.block_shape)  # a descriptor, whose layout the kernel's constants decide


def launcher(kernel: Any, /, **named: Any) -> Launcher:
    """The same one for the same constants and options, each of which can be hashed."""
    key = (id(kernel), *named.items())  # kernels live as long as their modules
    found = _launchers.get(key)
    return found if found is not None else _launchers.setdefault(key, Launcher(kernel, **named))


_launchers: dict[tuple[Any, ...], Launcher] = {}
