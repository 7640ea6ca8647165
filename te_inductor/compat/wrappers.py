"""Wrappers of data-parallel training, FSDP2, FSDP's first version, and DDP; and tensors whose contents torch exchanges."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor.compat.checkpoints import checkpoint_of_call, wrap_recomputation
from te_inductor.compat.dynamo import guard_on
from te_inductor.compat.patches import patch


def imported(module: str, name: str) -> Any:
    """A name of a module; None where no thread of this process has imported the module that far."""
    return getattr(sys.modules.get(module), name, None)


def is_gathered(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 gathers it for each forward and lets go of its memory behind."""
    return any(one.whole is parameter for one in gathered())


class Gathered(NamedTuple):
    """A parameter under FSDP2. A module holds its shards, or during its forward the whole."""

    shards: Sequence[torch.Tensor]
    whole: torch.Tensor | None  # None before it is gathered first

    @property
    def mesh(self) -> Any:
        """The mesh over which it is sharded, and replicated where the mesh has a dimension for that."""
        return mesh_of_dtensor(self.shards[0])


def gathered() -> Iterator[Gathered]:
    """Every parameter of this process that FSDP2 gathers."""
    for one in (one for group in gathered_at_once() for one in group.fsdp_params):
        shards = [getattr(one, name, None) for name in ("sharded_param", "_sharded_post_forward_param")]
        yield Gathered([s for s in shards if s is not None], getattr(one, "_unsharded_param", None))


def gathered_at_once() -> Iterator[Any]:
    """The groups of parameters of this process that FSDP2 gathers at once."""
    states = imported("torch.distributed._composable_state", "_module_state_mapping") or {}
    for reference in list(states.values()):
        yield from groups_of(reference())


def fsdp_group_of(parameter: torch.Tensor) -> Any:
    """The group in which FSDP2 has gathered a parameter, of which `reduce_grads` says whether the next backward reduces
    its gradient; None of any other."""
    for group in gathered_at_once():
        if any(getattr(one, "_unsharded_param", None) is parameter for one in group.fsdp_params):
            return group
    return None


def groups_of(state: Any) -> list[Any]:
    """What FSDP2 gathers at once of a module's parameters, by the module's state."""
    # The first is 2.15's name, the second what earlier releases have.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def mesh_of_dtensor(tensor: torch.Tensor) -> Any:
    """The DeviceMesh of a DTensor; None of any other tensor."""
    return tensor.device_mesh if _is_a(tensor, "torch.distributed.tensor", "DTensor") else None  # type: ignore[attr-defined]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor itself."""
    return tensor if mesh_of_dtensor(tensor) is None else tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same, without autograd, also of a fake tensor."""
    return tensor if mesh_of_dtensor(tensor) is None else tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def is_sharded_module(module: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called with it."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def is_flattened_module(module: torch.nn.Module) -> bool:
    """Whether it is one of FSDP's first version, whose layers hold views of one flat parameter."""
    return _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is_a(one: object, module: str, name: str) -> bool:
    kind = imported(module, name)
    return kind is not None and isinstance(one, kind)


def inside_ddp() -> bool:
    """Whether the forward of a torch DistributedDataParallel runs, whose `_get_active_ddp_module` Dynamo asks as well.
    The graph that is being compiled is compiled anew where the answer is another."""
    guard_on(*_ACTIVE_DDP, by_type=True)
    return _active_ddp() is not None


def ddp_reduces_later() -> bool:
    """Whether the forward of a DistributedDataParallel runs that leaves gradients to another forward's backward, as in
    `no_sync()`. The graph that is being compiled is compiled anew where the answer is another."""
    if not inside_ddp():
        return False
    guard_on(_ACTIVE_DDP[0], f"{_ACTIVE_DDP[1]}.require_backward_grad_sync")
    ddp = _active_ddp()
    return not ddp.require_backward_grad_sync and not _is_in_pipeline(ddp)


_in_pipelines = WeakSet[Any]()


def _is_in_pipeline(ddp: Any) -> bool:
    """Whether a stage of a pipeline runs a DistributedDataParallel: all forwards in `no_sync()`, and the last backward as
    if its forward had not been. Ranks that share the stage have one schedule, so equally many microbatches."""
    stage = imported("torch.distributed.pipelining.stage", "PipelineStage")
    frame = None if stage is None else sys._getframe()
    while frame is not None and frame.f_code is not stage.forward_maybe_with_nosync.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        _in_pipelines.add(ddp)
    return ddp in _in_pipelines


# With these DDP has its ranks run other layers than each other, or some of them more often than others.
_RUN_APART = ("find_unused_parameters", "_join_config.enable")
_ACTIVE_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module")


def _active_ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def inside_ddp_again(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that is compiled in the forward of a DistributedDataParallel, as it is called. A checkpoint that calls it
    there computes it again in the backward, where by its guards another graph would run, which saves other tensors: so
    that is done inside of the same DistributedDataParallel once more."""
    if _active_ddp() is None:
        return compiled

    def run(*inputs: Any) -> Any:
        ddp = _active_ddp()
        checkpoint, again = checkpoint_of_call()
        if ddp is not None and checkpoint is not None and not again:
            wrap_recomputation(checkpoint, _as_now(ddp))
        return compiled(*inputs)

    return run


def _as_now(ddp: Any) -> Callable[[], AbstractContextManager[None]]:
    """A context that is what the forward of a DistributedDataParallel is now, in `no_sync()` or not."""
    reduces = ddp.require_backward_grad_sync

    @contextmanager
    def inside() -> Iterator[None]:
        then, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, reduces
        try:
            with ddp._inside_ddp_forward():
                yield
        finally:
            ddp.require_backward_grad_sync = then

    return inside


_reentrant = threading.local()


def in_reentrant_forward() -> bool:
    """Whether the forward of a checkpoint with reentry runs (``use_reentrant=True``), which its backward repeats with
    gradients."""
    return bool(getattr(_reentrant, "depth", 0))


def reenter_inside_ddp() -> None:
    """Have the same done from now on of what checkpoints with reentry call in the forward of a DistributedDataParallel."""
    from torch.utils.checkpoint import CheckpointFunction

    original = CheckpointFunction.forward

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        ddp = _active_ddp()
        inside = nullcontext if ddp is None else _as_now(ddp)

        def run(*inputs: Any) -> Any:
            with inside() if _active_ddp() is None else nullcontext():
                return run_function(*inputs)

        _reentrant.depth = getattr(_reentrant, "depth", 0) + 1
        try:
            return original(ctx, run, *args)
        finally:
            _reentrant.depth -= 1

    patch("torch.utils.checkpoint.CheckpointFunction.forward", staticmethod(forward))


reenter_inside_ddp()


def is_cut_by_ddp(gm: torch.fx.GraphModule) -> bool:
    """Whether Dynamo's DDPOptimizer made this graph of a part of another one."""
    why = getattr(gm, "compile_subgraph_reason", None)
    return why is not None and "DDPOptimizer" in why.reason


def ddp_group_of(parameter: torch.Tensor) -> Any:
    """The process group of the DistributedDataParallel whose forward runs, if it keeps this parameter equal and its ranks
    run the same layers equally often; else None. Where DDP cuts a graph, a piece knows its parameters as fake tensors:
    these are taken to be DDP's."""
    ddp = _active_ddp()
    if ddp is None or any(attrgetter(one)(ddp) for one in _RUN_APART):
        return None
    own = (*ddp._module_parameters, *ddp._delay_all_reduce_params)
    known = isinstance(parameter, FakeTensor) or any(one is parameter for one in own)
    return ddp.process_group if known else None


def name_in_ddp(parameter: torch.Tensor) -> str | None:
    """The name of a parameter in the DistributedDataParallel whose forward runs; None where there is neither."""
    ddp = _active_ddp()
    names = () if ddp is None else ddp.module.named_parameters()
    return next((name for name, one in names if one is parameter), None)


def guard_on_wrappers() -> None:
    """Have Dynamo compile anew where there is a default process group and was none, or the other way round, or where
    another DistributedDataParallel's forward runs, if `ddp_group_of` finds another process group by it."""
    if not torch.distributed.is_available():
        return
    guard_on("torch.distributed.distributed_c10d", "GroupMember.WORLD", by_type=True)
    if inside_ddp():
        for one in ("process_group.group_name", *_RUN_APART):
            guard_on(_ACTIVE_DDP[0], f"{_ACTIVE_DDP[1]}.{one}")


class _Inferences(threading.local):
    """The runs of a pipeline's stages, in this thread, that find shapes."""

    running = 0
    are_told = False  # whether none of them began before there was a patch


_inferences = _Inferences()


def in_metadata_inference() -> bool:
    """Whether a stage of a pipeline runs to find the shapes that it sends: on memory that nothing was written to, with a
    backward of ones. A walk over the frames of each call would take 13 us of one that is 60 deep; a thread walks until it
    is once found outside."""
    if _inferences.are_told:
        return _inferences.running > 0
    stage = imported("torch.distributed.pipelining.stage", "PipelineStage")
    if not hasattr(stage, "_forward_metadata_inference"):  # before 2.13 its tensors are on `meta`
        return False
    code, frame = _tell_inferences(), sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    _inferences.are_told = frame is None
    return frame is not None


@functools.cache
def _tell_inferences() -> Any:
    """Have those that begin from now on be counted; returns the code of torch's function."""
    from torch.distributed.pipelining.stage import PipelineStage

    original = PipelineStage._forward_metadata_inference

    @functools.wraps(original)
    def inference(*args: Any, **kwargs: Any) -> Any:
        _inferences.running += 1
        try:
            return original(*args, **kwargs)
        finally:
            _inferences.running -= 1

    patch("torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference", inference)
    return inspect.unwrap(original).__code__


def around_swaps(held: Callable[[Tensor, Tensor], AbstractContextManager[None]]) -> None:
    """Have `torch.utils.swap_tensors` run inside of ``held(t1, t2)`` from now on."""
    original = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        with held(t1, t2):
            original(t1, t2)

    patch("torch.utils.swap_tensors", swap_tensors)


def after_zero_grad(tell: Callable[[Iterable[Tensor]], None]) -> None:
    """Have ``tell(parameters)`` called from now on where an optimizer or a module has thrown gradients of these away."""

    def told(zero_grad: Callable[..., None], parameters: Callable[[Any], Iterable[Tensor]]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def zero(self: Any, set_to_none: bool = True) -> None:
            zero_grad(self, set_to_none)
            if not torch.compiler.is_compiling():
                tell(parameters(self))

        return zero

    optimizers, modules = torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad
    in_groups = told(optimizers, lambda self: (p for group in self.param_groups for p in group["params"]))
    patch("torch.optim.Optimizer.zero_grad", in_groups)
    patch("torch.nn.Module.zero_grad", told(modules, lambda self: self.parameters()))
