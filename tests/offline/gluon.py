"""Gluon kernels whose partitions share memory, run as the Python they are written in.

Triton's interpreter has no Gluon. What goes wrong in such kernels is order: who waits for which filling of a stage, and
when a stage may be filled again. So each partition is a thread here, and

- a barrier counts arrivals and bytes, and tells its phases apart by one bit, as the hardware's does; an arrival too
  many is an error;
- copies of a loading warp end in any order, at any time;
- products of a warp group read what they multiply in shared memory when they are waited for, and not before;
- shared memory begins as NaN, and its stages lie where they were asked for.

Layouts are not checked (`assert_trivial` is, by the compiler, where tests compile), assembly is not executed
(`assembly` stands for it; other tests execute it line by line), and values are numpy arrays."""

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

LATE = 5e-3  # seconds that a copy takes at most, where most take a thousandth

_NAMES = ("int64", "int32", "int16", "int8", "uint8", "float32")
_TYPES = {getattr(gl, name): np.dtype(name) for name in _NAMES}


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
        if not bitcast:
            return self.astype(_TYPES[dtype]).view(Array) if dtype in _TYPES else self  # floats stay fp32
        if dtype == gl.bfloat16:
            return array((self.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        if dtype == gl.float8e4nv:
            return array(torch.from_numpy(np.ascontiguousarray(self)).view(torch.float8_e4m3fn).float())
        return self.view(_TYPES[dtype])


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
        self.values, self.shape, self.dtype = values, values.shape, None

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
        """Waits until the phase of that parity is over: at the start, that before the first."""
        program, wish = self.program, (self, parity)
        program.rest()
        with program.changed:
            program.wishes.append(wish)
            try:
                while self.parity == parity:
                    if program.errors or program.is_stuck():
                        raise Stuck
                    program.changed.wait(0.05)
            finally:
                program.wishes.remove(wish)


class Descriptor:
    """A descriptor of a tensor in memory, (rows, columns), copied in boxes; beyond its edge there are zeros. Floats are
    fp32 here, and count as many bytes as they have in memory."""

    def __init__(self, tensor: torch.Tensor, box: tuple[int, int]) -> None:
        self.values, self.box, self.layout = numpy_of(tensor), box, None
        self.dtype = self.values.dtype
        self.block_type = SimpleNamespace(nbytes=box[0] * box[1] * tensor.element_size())

    def read(self, row: int, column: int) -> np.ndarray:
        found = np.zeros(self.box, self.values.dtype)
        part = self.values[row : row + self.box[0], column : column + self.box[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class _Sum:
    """A sum of which products may not have been added yet."""

    def __init__(self, value: Array) -> None:
        self.value = value


class Program:
    """One program of a kernel: its partitions, its barriers, and the copies that are on their way."""

    def __init__(
        self,
        number: int,
        assembly: dict[str, Callable[..., Any]],  # what an inline assembly makes, by its text
        late: Callable[[float], float] | None = None,
    ) -> None:
        """A copy takes `late` seconds, by how far along a row it begins, of 1; where infinite, until all wait."""
        self.random, self.number, self.assembly = random.Random(number), number, assembly
        self.late = late or (lambda _: self.random.random() ** 6 * LATE)
        self.changed, self.copies, self.errors = threading.Condition(), [], []
        self.partition = threading.local()  # its products that are under way
        self.over, self.running = False, 0  # partitions
        self.wishes: list[tuple[Barrier, int]] = []  # of those that wait

    def run(self, kernel: JITFunction, *args: Any, **constants: Any) -> None:
        """Runs a kernel in Python, on Descriptors, Pointers and numbers. Raises what a partition raises."""
        memory = threading.Thread(target=self._copy_all)
        memory.start()
        try:
            self._python(kernel)(*args, **constants)
        finally:
            self.over = True
            memory.join()
        if self.errors:
            raise self.errors[0]

    def _all_wait(self) -> bool:
        waits = all(barrier.parity == parity for barrier, parity in self.wishes)
        return len(self.wishes) == self.running and waits

    def is_stuck(self) -> bool:
        return self._all_wait() and not self.copies

    def rest(self) -> None:
        """Let others go first, now and then."""
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)

    def _copy_all(self) -> None:
        while not self.over:
            time.sleep(1e-4)
            now = time.monotonic()
            due = [copy for copy in self.copies if copy[0] <= now]
            with self.changed:
                if not due and self._all_wait():
                    due = self.copies[:1]
            for copy in due:
                _, descriptor, place, barrier, into = copy
                into.values[...] = descriptor.read(*place)
                self._noting(barrier.filled, descriptor.block_type.nbytes)
                self.copies.remove(copy)

    def _noting(self, function: Callable[..., None], *args: Any) -> None:
        """Errors, for which others would wait in vain."""
        try:
            function(*args)
        except Exception as error:
            self.errors.append(error)

    def _partitions(self, parts: list[Any], warps: Any, registers: Any) -> None:
        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.partition.products = []
            self._noting(function, *args)
            with self.changed:
                self.running -= 1

        self.running = len(parts)
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
                found = modules[id(given)] = {**given, "range": lambda *ends: map(Number, range(*ends))}
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
            kind = _TYPES.get(dtype, np.float32)
            return Memory(np.full(shape, np.iinfo(kind).max if np.issubdtype(kind, np.integer) else np.nan, kind))

        def loaded(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
            place, mask = np.broadcast_arrays(pointer.offset, mask)
            assert not mask.any() or 0 <= place[mask].min() <= place[mask].max() < pointer.values.size
            found = np.where(mask, pointer.values[np.where(mask, place, 0)], other)
            return Number(found) if found.ndim == 0 and found.dtype.kind == "i" else array(found)

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
            products = self.partition.products
            while len(products) > under_way:
                y, left, right, use_acc = products.pop(0)
                product = (left.values if isinstance(left, Memory) else left) @ right.values
                y.value = array(y.value + product if use_acc else product)
            found = deps if under_way else [y.value for y in deps]
            return found[0] if len(found) == 1 else tuple(found)

        def multiplied(left: Any, right: Memory, y: Any, is_async: bool, use_acc: bool = True) -> _Sum:
            y = y if isinstance(y, _Sum) else _Sum(y)
            self.partition.products.append((y, left, right, use_acc))
            return y

        def copied(descriptor: Descriptor, place: list[int], barrier: Barrier, into: Memory) -> None:
            due = time.monotonic() + self.late(place[1] / descriptor.values.shape[1])
            self.copies.append((due, descriptor, [int(p) for p in place], barrier, into))

        def either(of_numbers: Any, of_arrays: Any) -> Callable[[Any, Any], Any]:
            return lambda a, b: (of_arrays if np.ndim(a) or np.ndim(b) else of_numbers)(a, b)

        language = SimpleNamespace(
            **{name: getattr(gl, name) for name in ("constexpr", *_NAMES, "bfloat16", "float8e4nv")},
            **dict.fromkeys(
                ("NVMMADistributedLayout", "SwizzledSharedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout"),
                lambda *_, **__: None,
            ),
            program_id=lambda axis: Number(self.number), allocate_shared_memory=allocate, warp_specialize=self._partitions,
            static_range=range, minimum=either(min, np.minimum), maximum=either(max, np.maximum),
            max=lambda values, axis: values.max(axis),
            where=lambda given, yes, no: array(np.where(given, yes, no)) if np.ndim(given) else (yes if given else no),
            zeros=lambda shape, dtype, layout: array(np.zeros(shape, _TYPES[dtype])),
            arange=lambda start, end, layout: array(np.arange(start, end)), expand_dims=np.expand_dims,
            reshape=np.reshape, permute=np.transpose, convert_layout=laid_out,
            join=lambda a, b: np.stack((a, b), -1).view(Array), split=lambda a: (a[..., 0], a[..., 1]),
            inline_asm_elementwise=inline, load=loaded, store=stored,
        )  # fmt: skip
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.start(count),
            expect=lambda barrier, nbytes: barrier.arrive(nbytes),
            arrive=lambda barrier, pred=True: barrier.arrive() if pred else None,
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
