"""Gluon kernels whose partitions share memory, run as the Python they are written in.

Triton's interpreter has no Gluon. What goes wrong in such kernels is order: who waits for which filling of a stage, and when
a stage may be filled again. So each partition is a thread here, and

- a barrier counts arrivals and bytes, and tells its phases apart by one bit, as the hardware's does; an arrival too many is
  an error;
- copies of a loading warp end in any order, at any time;
- products of a warp group read their right operand, in shared memory, when they are waited for, and not before;
- shared memory begins as NaN, and its stages lie where they were asked for.

Layouts are not checked (`assert_trivial` is, by the compiler, where tests compile), assembly is not executed (`assembly`
stands for it; other tests execute it line by line), and values are numpy arrays.
"""

import random
import threading
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

PATIENCE = 2.0  # seconds that nobody waits unless all do

_TYPES = {gl.int64: np.int64, gl.int32: np.int32, gl.int16: np.int16, gl.int8: np.int8, gl.float32: np.float32}


class Stuck(Exception):
    """A partition waits for a barrier that nobody will complete."""


class Array(np.ndarray):
    """A tensor in registers."""

    layout: Any = None

    def __array_finalize__(self, other: Any) -> None:
        self.layout = getattr(other, "layout", None)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> "Array":
        if bitcast and dtype == gl.bfloat16:
            return array((self.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        return self.astype(_TYPES[dtype]).view(Array) if dtype in _TYPES else self  # floats stay fp32


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


class Number(int):
    """A scalar, whose results are scalars."""

    def to(self, dtype: Any) -> "Number":
        return self


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "xor", "rxor"):
    _operation = getattr(int, f"__{_name}__")
    setattr(Number, f"__{_name}__", lambda a, b, _operation=_operation: _scalar(_operation(a, b)))


def _scalar(found: Any) -> Any:
    return found if found is NotImplemented else Number(found)


class Memory:
    """Shared memory: (stages, rows, columns), or a part of it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.dtype = values, None

    def index(self, place: Any) -> "Memory":
        return Memory(self.values[int(place)])

    def slice(self, start: Any, length: Any) -> "Memory":
        return Memory(self.values[int(start) : int(start) + int(length)])

    def permute(self, order: Any) -> "Memory":
        return Memory(self.values.transpose(order))

    def load(self, layout: Any) -> Array:
        return array(self.values.copy())

    def store(self, values: Array) -> None:
        self.values[...] = values


class Pointer:
    def __init__(self, values: np.ndarray, offset: Any = 0) -> None:
        self.values, self.offset = values, offset
        self.dtype = SimpleNamespace(element_ty=gl.float32)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.values, self.offset + offset)


class Barrier:
    def __init__(self, program: "Program") -> None:
        self.program, self.parity, self.bytes = program, 0, 0

    def start(self, count: int) -> None:
        self.count = self.left = count

    def _advance(self) -> None:
        assert self.left >= 0, "more arrived than were expected"
        if self.left == 0 and self.bytes == 0:
            self.parity ^= 1
            self.left = self.count
        self.program.changed.notify_all()

    def arrive(self, nbytes: int = 0) -> None:
        with self.program.changed:
            self.bytes += nbytes
            self.left -= 1
            self._advance()

    def filled(self, nbytes: int) -> None:
        with self.program.changed:
            self.bytes -= nbytes
            self._advance()

    def wait(self, parity: int) -> None:
        """Until the phase of that parity is over: at the start, that before the first."""
        self.program.rest()
        with self.program.changed:
            if not self.program.changed.wait_for(lambda: self.parity != parity, PATIENCE):
                raise Stuck


class Descriptor:
    """Of a tensor in memory, (rows, columns), copied in boxes; beyond its edge there are zeros."""

    def __init__(self, values: np.ndarray, box: tuple[int, int]) -> None:
        self.values, self.box, self.layout, self.dtype = values, box, None, values.dtype
        self.block_type = SimpleNamespace(nbytes=box[0] * box[1] * values.itemsize)

    def read(self, row: int, column: int) -> np.ndarray:
        found = np.zeros(self.box, self.values.dtype)
        part = self.values[row : row + self.box[0], column : column + self.box[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class _Sum:
    """A sum whose last products may not have been made."""

    def __init__(self, value: Array) -> None:
        self.value, self.products = value, []

    def wait(self, under_way: int) -> Array:
        while len(self.products) > under_way:
            left, right = self.products.pop(0)
            self.value = array(self.value + left @ right.values.astype(np.float32))
        return self.value


class Program:
    """One program of a kernel: its partitions, its barriers, and the copies that are on their way."""

    def __init__(self, seed: int, number: int, assembly: dict[str, Callable[..., Any]]) -> None:
        self.random, self.number, self.assembly = random.Random(seed), number, assembly
        self.changed, self.copies, self.errors = threading.Condition(), [], []
        self.over = False

    def run(self, kernel: JITFunction, *args: Any, **constants: Any) -> None:
        """In Python, on Descriptors, Pointers and numbers. Raises what a partition raises."""
        memory = threading.Thread(target=self._copy_all)
        memory.start()
        try:
            self._python(kernel)(*args, **constants)
        finally:
            self.over = True
            memory.join()
        if self.errors:
            raise self.errors[0]

    def rest(self) -> None:
        """Let others go first, now and then."""
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)

    def _copy_all(self) -> None:
        while not self.over or self.copies:
            time.sleep(self.random.random() * 1e-4)
            if not self.copies:
                continue
            descriptor, place, barrier, into = self.copies.pop(self.random.randrange(len(self.copies)))
            into.values[...] = descriptor.read(*place)
            barrier.filled(descriptor.block_type.nbytes)

    def _partitions(self, parts: list[Any], warps: Any, registers: Any) -> None:
        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except Exception as error:  # which the others will wait for in vain
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _python(self, kernel: JITFunction) -> Callable[..., None]:
        """The kernel's function, and those that it calls, with all of the above for Gluon."""
        modules: dict[int, dict[str, Any]] = {}

        def of(function: JITFunction) -> FunctionType:
            code = function.fn
            return FunctionType(code.__code__, names(code.__globals__), code.__name__, code.__defaults__)

        def names(given: dict[str, Any]) -> dict[str, Any]:
            if id(given) not in modules:
                found = modules[id(given)] = dict(given)
                for name, value in given.items():
                    if isinstance(value, JITFunction):
                        found[name] = of(value)
                    elif isinstance(value, gl.constexpr):
                        found[name] = value.value
                    elif name in stands_for:
                        found[name] = stands_for[name]
            return modules[id(given)]

        stands_for = self._gluon()
        return of(kernel)

    def _gluon(self) -> dict[str, Any]:
        def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
            if shape[-1] == 1:
                return SimpleNamespace(index=[Barrier(self) for _ in range(shape[0])].__getitem__)
            kind = _TYPES.get(dtype, dtype)
            return Memory(np.full(shape, -1 if np.issubdtype(kind, np.integer) else np.nan, kind))

        def stored(pointer: Pointer, values: Array, mask: Array) -> None:
            place, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
            pointer.values[place[mask]] = values[mask]

        def laid_out(values: Array, layout: Any, assert_trivial: bool = False) -> Array:
            values = values.view()
            values.layout = layout
            return values

        def inline(text: str, constraints: str, args: list[Array], **_: Any) -> Any:
            return self.assembly[text](*args)

        def waited(under_way: int, deps: list[_Sum]) -> Any:
            made = [dep.wait(under_way) for dep in deps]
            found = deps if under_way else made
            return found[0] if len(found) == 1 else tuple(found)

        def multiplied(left: Array, right: Memory, y: _Sum, is_async: bool) -> _Sum:
            y.products.append((left, right))
            return y

        def copied(descriptor: Descriptor, place: list[int], barrier: Barrier, into: Memory) -> None:
            self.copies.append((descriptor, [int(p) for p in place], barrier, into))

        language = SimpleNamespace(
            **{name: getattr(gl, name) for name in ("constexpr", "int8", "int16", "int32", "int64", "float32", "bfloat16")},
            NVMMADistributedLayout=lambda **_: None, SwizzledSharedLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            program_id=lambda axis: Number(self.number), allocate_shared_memory=allocate, warp_specialize=self._partitions,
            static_range=range, minimum=min, where=lambda given, yes, no: yes if given else no,
            zeros=lambda shape, dtype, layout: array(np.zeros(shape, np.float32)),
            arange=lambda start, end, layout: array(np.arange(start, end)), expand_dims=np.expand_dims,
            reshape=np.reshape, permute=np.transpose, convert_layout=laid_out,
            join=lambda a, b: np.stack((a, b), -1).view(Array), split=lambda a: (a[..., 0], a[..., 1]),
            inline_asm_elementwise=inline, load=lambda pointer: pointer.values[pointer.offset], store=stored,
        )  # fmt: skip
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.start(count),
            expect=lambda barrier, nbytes: barrier.arrive(nbytes), arrive=lambda barrier: barrier.arrive(),
            wait=lambda barrier, parity: barrier.wait(parity),
        )  # fmt: skip
        return {
            "gl": language, "mbarrier": barriers, "copy": copied, "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None, "warpgroup_mma": multiplied, "warpgroup_mma_wait": waited,
            "warpgroup_mma_init": lambda y: y if isinstance(y, _Sum) else _Sum(y),
        }  # fmt: skip


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """bf16 and fp16 as fp32, the rest as it is."""
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
