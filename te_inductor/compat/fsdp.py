"""What FSDP2 knows of the parameters that it shards: private parts of torch.distributed.fsdp._fully_shard, one property
each.

Names are those of torch 2.11 to 2.13."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor.compat.wrappers import groups_of, imported

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Hook:
    """A function that FSDP calls around its all-gather. FSDP asks for its signature at each, which takes Python longer
    than the hook itself where it is not kept: 50 to 100 microseconds a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__signature__ = function, inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter of a model, and the rank's part of it."""

    param: Any  # FSDPParam
    group: Any  # FSDPParamGroup: what is gathered at once

    @property
    def modules(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold it, each with its name there."""
        info = self.param._module_info
        return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]

    @property
    def sharded(self) -> Tensor:
        """The DTensor that the optimizer sees."""
        return self.param.sharded_param  # type: ignore[no-any-return]

    @property
    def gathered(self) -> Tensor | None:
        """The parameter as the forward sees it; None before it is gathered first."""
        return getattr(self.param, "_unsharded_param", None)

    @property
    def shape(self) -> torch.Size:
        return self.param._orig_size  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which FSDP itself gathers it."""
        wanted = self.group.mp_policy.param_dtype
        return wanted if wanted is not None else self.sharded.dtype  # type: ignore[no-any-return]

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The names among which `sharded` is found, and its own."""
        return vars(self.param), "sharded_param"

    @property
    def rows(self) -> Tensor:
        """The rank's rows, which may be none, in the dtype in which FSDP gathers them; without a record."""
        return self._detached._local_tensor  # type: ignore[no-any-return]

    @property
    def whole(self) -> Tensor:
        """All rows, gathered, without a record; all ranks ask at once."""
        return self._detached.full_tensor()  # type: ignore[no-any-return]

    @property
    def _detached(self) -> Any:
        return self.sharded.detach().to(self.dtype)

    @property
    def is_offloaded(self) -> bool:
        """Whether its rows are on the CPU, and gathered on another device."""
        return bool(self.param.offload_to_cpu)

    @property
    def data(self) -> Tensor:
        """The rank's rows, with zeros behind where it has fewer than the first rank."""
        return self.param._sharded_param_data.view(self.param.padded_sharded_param_size)  # type: ignore[no-any-return]

    @property
    def first_row(self) -> int:
        return self.param.mesh_info.shard_mesh_rank * self.param.padded_sharded_param_size[0]  # type: ignore[no-any-return]

    @property
    def ranks(self) -> Any:
        """The process group over which it is sharded."""
        return self.param.mesh_info.shard_process_group

    @property
    def replicas(self) -> Any:
        """The process group of the ranks that hold the same rows; None without such."""
        return getattr(self.param.mesh_info, "replicate_process_group", None)

    @property
    def parallel(self) -> Any:
        """The process group of the ranks that have other rows or columns of it by tensor parallelism, whose part each
        gathers; None without such."""
        return None if self._tensor_parallel is None else self._tensor_parallel.mesh.get_group()

    @property
    def _tensor_parallel(self) -> Any:
        """How DTensors of the gathered parameter are placed."""
        if not self.param.is_dtensor:
            return None
        # The second is the name that torch 2.11 has.
        return getattr(self.param, "_unsharded_dtensor_spec", None) or self.param._tp_spec

    @property
    def device(self) -> torch.device:
        return self.param.device  # type: ignore[no-any-return]

    @property
    def in_backward(self) -> bool:
        """Whether it is gathered for a backward."""
        return self.group._training_state.name == "PRE_BACKWARD" or torch._C._current_graph_task_id() >= 0

    @property
    def reduces_gradient(self) -> bool:
        """Whether the next backward reduces its gradient, which `set_requires_gradient_sync` decides."""
        return bool(self.group.reduce_grads)

    @property
    def is_hooked(self) -> bool:
        return hasattr(self._local, _PRE)

    def hook(self, pre: Hook, post: Hook) -> None:
        """Have FSDP gather what `pre` returns, and make the parameter of it by `post`: attributes of the local tensor,
        which are lost where FSDP or the user puts another one in its place."""
        if getattr(self._local, _PRE, None) is not pre:
            setattr(self._local, _PRE, pre)
            setattr(self._local, _POST, post)
            self.param._init_extensions()

    @property
    def _local(self) -> Tensor:
        return self.param._sharded_local_tensor  # type: ignore[no-any-return]

    def refusal(self) -> str | None:
        """Why FSDP does not let its all-gather be replaced."""
        mesh = self.param.mesh_info
        if not hasattr(mesh, "shard_mesh_size"):
            return "it is replicated, not sharded, and never gathered"
        spec = self._tensor_parallel
        if spec is not None and len(spec.placements) != 1:
            return f"it is a DTensor under FSDP too, over a mesh of {len(spec.placements)} dimensions, not one"
        if self.param.fsdp_placement.dim != 0:
            return f"it is sharded along dimension {self.param.fsdp_placement.dim}, not by rows"
        return None

    def group_refusal(self) -> tuple[str, str] | None:
        """What of its `fully_shard` call rules out another all-gather, and what would not."""
        if self.is_offloaded:
            return "offload_policy=CPUOffloadPolicy()", "an offload_policy that leaves shards on the device"
        if self.group._use_post_forward_mesh:
            return "an int for reshard_after_forward", "True or False"
        return None


def sharded_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """The sharded parameters of all modules that `fully_shard` was called with, in an order that all ranks have in
    common."""
    state_of = imported("torch.distributed.fsdp._fully_shard._fsdp_state", "_get_module_fsdp_state")
    seen: set[int] = set()
    for module in model.modules() if state_of is not None else ():
        for group in groups_of(state_of(module)):
            if id(group) not in seen:
                seen.add(id(group))
                yield from (ShardedParameter(param, group) for param in group.fsdp_params)


def without_sharding(module: nn.Module) -> nn.Module:
    """The module as it was before `fully_shard`, but with the same attributes, parameters among them: of its own class,
    without FSDP's hooks and state. Its parts are the module's."""
    kind = type(module).__mro__[2]  # behind FSDP's class of it, and FSDPModule
    plain: nn.Module = object.__new__(kind)
    for key, value in vars(module).items():
        if key.endswith("_hooks"):
            value = type(value)((name, hook) for name, hook in value.items() if not _is_of_fsdp(hook))
        if not key.startswith(("__composable_api", "_is_fsdp", "_fsdp")):
            plain.__dict__[key] = value
    return plain


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this very module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__[:2])


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def members(group: Any) -> Sequence[int]:
    """The ranks of a process group, as the default one numbers them."""
    return torch.distributed.get_process_group_ranks(group)
