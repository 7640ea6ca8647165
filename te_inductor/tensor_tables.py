"""What is known of tensors, for as long as they live: tables by tensor or by group of tensors, and references.

# Note [References to tensors]
torch exchanges the contents of two tensor objects, `torch.utils.swap_tensors`, where `module.to()` meets a DTensor, a
stored weight or any other subclass, and for every parameter under `set_swap_module_params_on_conversion(True)`. It
refuses where anything refers weakly to one of them. So this package refers weakly to a tensor in one place alone, the
table `_keys`, and lets go of that reference while torch swaps. What is kept with a parameter stays with the object that
the module holds, as it does where torch sets the parameter's `.data`. That suits the contents that it has then: state
is on a device and copies are of a dtype, which is compared where a graph that is compiled for the new contents asks for
them."""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from te_inductor import compat

T = TypeVar("T")
D = TypeVar("D")
_serials = itertools.count()


class _Key:
    """What stands for one tensor in all tables, and dies with it: `_keys` alone keeps it alive."""

    __slots__ = ("__weakref__", "reference", "serial")

    def __init__(self, tensor: Tensor) -> None:
        self.serial = next(_serials)  # no other key ever has it, where an address is used again
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        self.reference: weakref.ref[Tensor] | None = weakref.ref(tensor, partial(_forget, _keys, id(tensor)))

    def tensor(self) -> Tensor | None:
        tensor = None if self.reference is None else self.reference()
        if tensor is not None:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # its Python object may have been C++'s alone
        return tensor


_keys: dict[int, _Key] = {}  # by the tensor's address


def _forget(keys: dict[int, _Key], address: int, reference: "weakref.ref[Tensor]") -> None:
    key = keys.get(address)
    if key is not None and key.reference is reference:
        del keys[address]


def _key_of(tensor: Tensor) -> _Key:
    return _keys.get(id(tensor)) or _keys.setdefault(id(tensor), _Key(tensor))


@contextmanager
def _let_go(*tensors: Tensor) -> Iterator[None]:
    """Refer to none of these meanwhile."""
    held = [(key, tensor) for tensor in tensors if (key := _keys.get(id(tensor))) is not None]
    for key, _ in held:
        key.reference = None
    try:
        yield
    finally:
        for key, tensor in held:
            key.hold(tensor)


compat.around_swaps(_let_go)


class TensorReference:
    """A tensor, or None once it is gone."""

    def __init__(self, tensor: Tensor) -> None:
        self._key = weakref.ref(_key_of(tensor))

    def __call__(self) -> Tensor | None:
        key = self._key()
        return None if key is None else key.tensor()

    def is_to(self, tensor: Tensor) -> bool:
        """Whether it is to this tensor, which takes a fraction of what it takes to return it."""
        key = _keys.get(id(tensor))
        return key is not None and key is self._key()


class TensorTable(Generic[T]):
    """A value for each of some tensors, kept no longer than the tensor."""

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[_Key, T] = WeakKeyDictionary()

    def get(self, tensor: Tensor, default: D) -> T | D:
        key = _keys.get(id(tensor))
        return default if key is None else self._values.get(key, default)

    def setdefault(self, tensor: Tensor, value: T) -> T:
        return self._values.setdefault(_key_of(tensor), value)

    def pop(self, tensor: Tensor, default: D) -> T | D:
        key = _keys.get(id(tensor))
        return default if key is None else self._values.pop(key, default)

    def values(self) -> list[T]:
        return list(self._values.values())

    def clear(self) -> None:
        self._values.clear()

    def __getitem__(self, tensor: Tensor) -> T:
        return self._values[_keys[id(tensor)]]

    def __setitem__(self, tensor: Tensor, value: T) -> None:
        self._values[_key_of(tensor)] = value

    def __contains__(self, tensor: Tensor) -> bool:
        key = _keys.get(id(tensor))
        return key is not None and key in self._values

    def __len__(self) -> int:
        return len(self._values)


class TensorGroups(Generic[T]):
    """A value for each group of tensors, in their order; kept with the first of them, and no longer than all of
    them."""

    def __init__(self) -> None:
        self._by_first: TensorTable[dict[tuple[int, ...], tuple[list[TensorReference], T]]] = TensorTable()

    def get(self, tensors: Sequence[Tensor]) -> T | None:
        groups = self._by_first.get(tensors[0], None)
        if groups is None:
            return None
        serials = tuple([key.serial if (key := _keys.get(id(t))) is not None else -1 for t in tensors])
        return groups[serials][1] if serials in groups else None

    def set(self, tensors: Sequence[Tensor], value: T) -> None:
        groups = self._by_first.setdefault(tensors[0], {})
        for serials in [one for one, (references, _) in groups.items() if any(ref() is None for ref in references)]:
            del groups[serials]
        references = [TensorReference(t) for t in tensors]
        groups[tuple(_key_of(t).serial for t in tensors)] = references, value

    def values(self, first: Tensor) -> list[T]:
        """The values of all groups that begin with a tensor."""
        return [value for _, value in self._by_first.get(first, {}).values()]

    def clear(self) -> None:
        self._by_first.clear()

    def __bool__(self) -> bool:
        return len(self._by_first) > 0
