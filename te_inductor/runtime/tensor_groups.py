"""What is known of groups of tensors, for as long as they live."""

import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class TensorGroups(Generic[T]):
    """A value for each group of tensors, in their order; kept with the first of them, and no longer than all of
    them."""

    def __init__(self) -> None:
        self._by_first: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[Tensor]) -> T | None:
        first, others = tensors[0], tensors[1:]
        references, value = self._by_first.get(first, {}).get(tuple(map(id, others)), ((), None))
        if value is None or any(
            ref() is not t for ref, t in zip(references, others, strict=True)
        ):  # an id is used again
            return None
        return value  # type: ignore[no-any-return]

    def set(self, tensors: Sequence[Tensor], value: T) -> None:
        first, others = tensors[0], tensors[1:]
        groups = self._by_first.setdefault(first, {})
        for key in [key for key, (references, _) in groups.items() if any(ref() is None for ref in references)]:
            del groups[key]
        groups[tuple(map(id, others))] = [weakref.ref(t) for t in others], value

    def values(self, first: Tensor) -> list[T]:
        """Of all groups that begin with a tensor."""
        return [value for _, value in self._by_first.get(first, {}).values()]

    def clear(self) -> None:
        self._by_first.clear()

    def __bool__(self) -> bool:
        return any(True for _ in self._by_first)
