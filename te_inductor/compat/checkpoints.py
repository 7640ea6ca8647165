"""Hooks on saved tensors: of checkpoints without reentry (`torch.utils.checkpoint`, ``use_reentrant=False``), as what
they call can see them, and of programs that offload what they save."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FRAMES = {"_checkpoint_hook": "frame", "_recomputation_hook": "target_frame_ref"}  # the names in each hook's closure


def checkpoint_of_call() -> tuple[Any, bool]:
    """The checkpoint without reentry that this code runs in, as an object that is the same one where the backward
    computes it again, and whether it does; None outside of one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks:
        return None, False
    pack = getattr(hooks[0], "__wrapped__", hooks[0])
    owner = getattr(pack, "__qualname__", "").partition(".")[0]
    if owner not in _FRAMES:
        return None, False
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    frame, again = cells[_FRAMES[owner]].cell_contents, owner == "_recomputation_hook"
    return frame() if again else frame, again


def wrap_recomputation(checkpoint: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have a checkpoint, as `checkpoint_of_call` returns it, compute again inside of a context, once."""
    compute = checkpoint.recompute_fn
    if isinstance(compute, _InContext):
        return
    checkpoint.recompute_fn = _InContext(compute, context)


class _InContext(NamedTuple):
    """What a checkpoint computes again, inside of a context."""

    compute: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any) -> Any:
        with self.context():
            return self.compute(*args)


class _Unpacked(NamedTuple):
    """Stands among what hooks have packed for a tensor that they were not shown."""

    tensor: Tensor


def saved_as_they_are(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A context in which hooks on saved tensors are not shown these tensors, which a backward may write: where a hook
    copies what is saved, as offloading does, the backward would write the copy."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not (hooks and torch.is_grad_enabled()):
        return nullcontext()
    pack, unpack = hooks
    kept = {one.data_ptr() for one in tensors if type(one) is Tensor and one.numel()}

    def pack_others(x: Tensor) -> Any:
        is_kept = type(x) is Tensor and x.numel() and x.data_ptr() in kept
        return _Unpacked(x) if is_kept else pack(x)

    def unpack_others(packed: Any) -> Any:
        return packed.tensor if isinstance(packed, _Unpacked) else unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack_others, unpack_others)
