"""What tensors that stand for masks hold: each version of each tensor is compared once.

# Note [Masks that a graph takes]
A mask that a graph takes, such as the buffer of a model or the input of a block that is compiled alone, has no nodes to
read. Its values are compared with a `Band`, at the compile, and the graph that is compiled for a band carries a guard.
The guard asks `band_of` before each run, which answers from what it has kept of the tensor: the object, its version
counter, and where and how it lies in memory. So a tensor that did not change costs a look into a dictionary, for all
graphs and layers that take it. Another tensor, or another version, is compared anew, for which the host waits for the
device; where it holds another band Dynamo compiles anew. A graph for tensors without a band has a guard too, so that it
does not serve those with one, until several in a row had none. What changes memory and counts no version, as a write through
``.data`` does, is not noticed."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_CHUNK = 1 << 24  # elements that are compared at a time
_DENSE_CALLS = 8  # tensors in a row without a band, at one place, after which none is looked for


@dataclass(frozen=True)
class Band:
    """A tensor (..., L, S) of two numbers: `inside` where ``q + below <= k <= q + above``, else `outside`."""

    inside: bool | int | float
    outside: bool | int | float
    above: int | None  # None: no bound
    below: int | None
    # Whether `outside` also stands in each column in which the last query has it, as under a padding.
    padded: bool = False

    def holds(self, q: Any, k: Any) -> list[Any]:
        """The bounds at some queries and keys: tensors, or expressions."""
        bounds = [] if self.above is None else [k <= q + self.above]
        return bounds if self.below is None else [*bounds, k >= q + self.below]


def band_of(tensor: Tensor) -> Band | None:
    """The band that a tensor holds; None where it holds another thing, or nobody would notice that it changes."""
    if not _is_plain(tensor):
        return None
    key = id(tensor)
    state = (tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride())
    known = _known.get(key)
    if known is not None and known[0]() is tensor and known[1] == state:
        return known[2]
    if _captures(tensor):
        return None
    with _disable_current_modes(), torch.no_grad():
        found = _compared(tensor)
    _known[key] = weakref.ref(tensor, lambda _: _known.pop(key, None)), state, found
    return found


_known: dict[int, tuple[weakref.ref[Tensor], Any, Band | None]] = {}


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which the host cannot wait."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Same:
    """The guard of a graph that was compiled for a band: whether a tensor holds that one. An input of a graph is written
    anew between replays of a CUDA graph; the buffers of a model are not."""

    def __init__(self, band: Band | None, is_buffer: bool) -> None:
        self.band, self.is_buffer = band, is_buffer
        self.dense = 0  # tensors without a band, or versions of one, in a row
        self.last: tuple[weakref.ref[Tensor], int] | None = None  # of them

    def __call__(self, tensor: Tensor) -> bool:
        if self.band is None and self.dense >= _DENSE_CALLS:
            return True
        found = None if not self.is_buffer and _captures(tensor) else band_of(tensor)
        if self.band is None:
            self._count(tensor, found)
        return found == self.band

    def _count(self, tensor: Tensor, found: Band | None) -> None:
        if found is not None or not _is_plain(tensor):
            self.dense, self.last = 0, None
        elif self.last is None or self.last[0]() is not tensor or self.last[1] != tensor._version:
            self.dense, self.last = self.dense + 1, (weakref.ref(tensor), tensor._version)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be read, and writes to it are counted."""
    return not (
        isinstance(tensor, FakeTensor)
        or is_functorch_wrapped_tensor(tensor)
        or is_traceable_wrapper_subclass(tensor)
        or tensor.layout != torch.strided
        or tensor.is_meta
        or tensor.is_complex()
        or tensor.requires_grad
        or tensor.is_inference()
        or tensor.dim() < 2
        or not tensor.numel()
    )


def _compared(tensor: Tensor) -> Band | None:
    """The band that a tensor holds, of the bounds that its first and its last row suggest."""
    length, keys = tensor.shape[-2:]
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    rows = tensor[(0,) * (tensor.dim() - 2)]
    ends = torch.stack((rows[0], rows[-1])).expand(2, keys).cpu()
    inside = ends[0, 0]
    first, last = ends == inside
    others = ends[ends != inside]
    above = None if first.all() else int(first.int().argmin()) - 1
    below = None if last[0] or not last.any() else int(last.int().argmax()) - (length - 1)
    suggested = [Band(inside.item(), (others[0] if len(others) else inside).item(), above, below)]
    if tensor.dtype is torch.bool or tensor.dtype.is_floating_point:
        attends = True if tensor.dtype is torch.bool else 0.0
        hides = ends[ends != attends]
        if len(hides):
            bounds = (0, None) if length == keys else (None,)
            suggested += [Band(attends, hides[0].item(), bound, None, padded=True) for bound in bounds]
    return next((band for band in suggested if _holds(band, tensor, length)), None)


def _holds(band: Band, tensor: Tensor, length: int) -> bool:
    rows, keys = tensor.shape[-2:]
    if rows < length and (band.above, band.below) != (None, None):
        return False  # all rows are one, and a bound is none of theirs
    k = torch.arange(keys, device=tensor.device)
    inside, outside = (
        torch.tensor(one, dtype=tensor.dtype, device=tensor.device) for one in (band.inside, band.outside)
    )
    columns = tensor[..., -1:, :] == inside if band.padded else None
    result = torch.ones((), dtype=torch.bool, device=tensor.device)
    step = max(1, _CHUNK * rows // tensor.numel())
    for start in range(0, rows, step):
        chunk = tensor[..., start : start + step, :]
        q = torch.arange(start, start + chunk.shape[-2], device=tensor.device)[:, None]
        held = torch.ones((), dtype=torch.bool, device=tensor.device)
        for bound in [*band.holds(q, k), *([] if columns is None else [columns])]:
            held = held & bound
        result &= (chunk == torch.where(held, inside, outside)).all()
    return bool(result)
