"""How kernels of Triton's are launched: on the device of their tensors, and without repeating what Triton found out before.

`kernel[grid](...)` launches on the current device, as PyTorch's ops do not, and at each call binds names, specializes
values, hashes options and compares globals, which takes the host longer than the launch. A `Launcher` keeps what Triton
compiled and calls it again. Which compiled kernel arguments need is decided by what Triton looks at: dtypes, whether
addresses and integers are multiples of 16, whether integers are one, and how many bits hold them.

# Note [Launches by address]
A launch is given addresses, of which the driver is not asked whose they are: CUDA tensors are told by torch. A matrix
that is copied in boxes is a tensor map, 128 bytes that follow from its address, sizes and box, so that maps are kept by
these. Triton's own launch encodes one each time, from a descriptor that checks itself, and asks hooks that nobody has
set."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_inductor.errors import LaunchError

ALIGNED = 16  # bytes, and what an integer is a multiple of
MOST_PROGRAMS = 2**31 - 1  # of a grid's first axis; the others hold 65,535, which no kernel uses
MOST_MAPS = 4096  # of one argument of a kernel; an allocator hands out the same few addresses again and again


class Box:
    """What one copy brings of a matrix. Equal boxes are one object, which whoever makes boxes has to see to."""

    __slots__ = ("layout", "shape")

    def __init__(self, shape: Sequence[int], layout: Any) -> None:
        self.shape, self.layout = list(shape), layout  # the layout is that of Gluon's shared memory


class Described:
    """A matrix that a kernel copies in boxes; several, one below the other, are one."""

    __slots__ = ("base", "box")

    def __init__(self, base: Tensor, box: Box) -> None:
        self.base, self.box = base, box

    def descriptor(self) -> TensorDescriptor:
        """Triton's, which checks the matrix."""
        matrix = self.base.view(-1, self.base.shape[-1])
        return TensorDescriptor.from_tensor(matrix, self.box.shape, self.box.layout)


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
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, programs: int, *arguments: Any, on: torch.device | None = None) -> None:
        """Launches on the current stream of `on`, by default the device of the first argument, a tensor or `Described`."""
        if programs > MOST_PROGRAMS:
            raise LaunchError(too_many(self._kernel.__name__, programs, arguments))
        if on is None:
            on = (arguments[0].base if type(arguments[0]) is Described else arguments[0]).device
        if on.type != "cuda":  # Triton's interpreter
            self._by_triton(programs, arguments)
        elif on.index == torch._C._cuda_getDevice():
            self._launch(programs, arguments, on.index)
        else:
            with torch.cuda.device(on):
                self._launch(programs, arguments, on.index)

    def _by_triton(self, programs: int, arguments: tuple[Any, ...]) -> Any:
        given = [one.descriptor() if type(one) is Described else one for one in arguments]
        return self._kernel[(programs,)](*given, **self._named)

    def _launch(self, programs: int, arguments: tuple[Any, ...], device: int) -> None:
        looked_at, given = specialized(arguments)
        key = (device, *looked_at)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = _Compiled(self._by_triton(programs, arguments), self._values)
        else:
            compiled.launch(programs, torch._C._cuda_getCurrentRawStream(device), given)


class _Compiled:
    """What Triton compiled: Note [Launches by address]."""

    __slots__ = ("_constants", "_kernel", "_maps", "_run")

    def __init__(self, kernel: CompiledKernel, constants: tuple[Any, ...]) -> None:
        self._kernel, self._constants = kernel, constants
        kinds = list(kernel.src.signature.values())
        places = [place for place, kind in enumerate(kinds) if _is_description(kind)]
        copies = zip(places, kernel.metadata.tensordesc_meta or (), strict=True)
        self._maps: list[tuple[int, Any, dict[Any, Any]]] = [(place, how, {}) for place, how in copies][::-1]
        self._run = kernel.run
        if places:  # the same launch, of a kernel that is given maps and sizes in the place of descriptors
            signature = dict(enumerate(part for kind in kinds for part in _parts(kind)))
            source = SimpleNamespace(fn=kernel.src.fn, constants={}, signature=signature)
            metadata = kernel.metadata._replace(tensordesc_meta=None)
            self._run = triton.runtime.driver.active.launcher_cls(source, metadata)

    def launch(self, programs: int, stream: int, given: list[Any]) -> None:
        for place, how, maps in self._maps:  # from the last on, as a map takes the places of several arguments
            base = given[place].base
            where = base.data_ptr(), base.shape, base.stride()
            found = maps.get(where)
            if found is None:
                if len(maps) >= MOST_MAPS:
                    maps.clear()
                found = maps[where] = make_tensordesc_arg(given[place].descriptor(), how)
            given[place : place + 1] = found
        kernel, runtime, about = self._kernel, triton.knobs.runtime, None
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            about = kernel.launch_metadata((programs,), stream)
        else:
            enter = leave = None
        self._run(
            programs, 1, 1, stream, kernel.function, kernel.packed_metadata, about, enter, leave, *given, *self._constants
        )  # fmt: skip


def _is_description(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _parts(kind: Any) -> list[Any]:
    """The types of what `make_tensordesc_arg` makes of a matrix; another argument's own type."""
    return ["nvTmaDesc", "i32", "i32", "i64", "i64"] if _is_description(kind) else [kind]


def too_many(kernel: str, programs: int, arguments: tuple[Any, ...]) -> str:
    """What a `LaunchError` says."""
    given = (getattr(argument, "base", argument) for argument in arguments)
    sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given if isinstance(tensor, Tensor))
    return (
        f"kernel {kernel} of tensors of sizes {sizes} wants {programs:,} programs, expected at most {MOST_PROGRAMS:,},"
        " which is CUDA's limit; give it its rows in several calls"
    )


def specialized(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What Triton compiles for of arguments, where equal lists can have one compiled kernel; and what a launch is given:
    addresses of CUDA tensors, and all else as it is."""
    looked_at: list[Any] = []
    given: list[Any] = []
    for value in arguments:
        kind = type(value)
        if kind is int:
            looked_at.append(_of_integer(value))
        elif value is None or kind is float:
            looked_at.append(kind)
        elif kind is Described:
            looked_at += value.box, value.base.dtype
        else:
            address = value.data_ptr()
            looked_at.append(value.dtype if address % ALIGNED == 0 else (value.dtype,))
            if value.is_cuda:
                value = address
        given.append(value)
    return looked_at, given


@functools.lru_cache(4096)
def _of_integer(value: int) -> int:
    bits = 4 * (not -(2**31) <= value < 2**31) + 8 * (value >= 2**63)
    return (value % ALIGNED == 0) + 2 * (value == 1) + bits


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``like.new_empty(shape, dtype=dtype)`` of two or three dimensions, on the current device by what generated code calls,
    which takes a third of the time."""
    device = like.device
    if device.type != "cuda" or device.index != torch._C._cuda_getDevice():
        return like.new_empty(shape, dtype=dtype)
    rows, columns = shape[-2] or 1, shape[-1] or 1
    strides = (columns, 1) if len(shape) == 2 else (rows * columns, columns, 1)
    make: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    return make(shape, strides, dtype)  # type: ignore[no-any-return]


def launcher(kernel: Any, /, **named: Any) -> Launcher:
    """The same one for the same constants and options, each of which can be hashed."""
    key = (id(kernel), *named.items())  # kernels live as long as their modules
    found = _launchers.get(key)
    return found if found is not None else _launchers.setdefault(key, Launcher(kernel, **named))


_launchers: dict[tuple[Any, ...], Launcher] = {}
