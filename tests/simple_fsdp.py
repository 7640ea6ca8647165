"""A model that gathers its own weights in its graph, as torchtitan's SimpleFSDP does."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


class Gathered(nn.Module):
    """What a parameter is computed with: all of it."""

    def __init__(self, **dtypes: Any) -> None:
        super().__init__()
        self.dtypes = dtypes

    def forward(self, shard: DTensor) -> Tensor:
        number = shard.device_mesh.ndim
        whole = shard.redistribute(placements=[Replicate()] * number, **self.dtypes)
        return whole.to_local(grad_placements=[Partial()] * number)


def simple_fsdp(model: nn.Module, mesh: Any, placements: Any, **dtypes: Any) -> nn.Module:
    """Shards each parameter, and has each module gather what it reads."""
    gather = Gathered(**dtypes)
    made: dict[Any, Any] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if parameter not in made:
                shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements), parameter.requires_grad)
                made[parameter] = made[shard] = shard
            module.register_parameter(name, made[parameter])
        if own:
            reads = {name: property(lambda self, name=name: gather(self._parameters[name])) for name in own}
            module.__class__ = type(module.__class__.__name__, (module.__class__,), reads)
    return model
