"""Graphs of one layer, traced on fake tensors."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def fakes(tensors: list[Tensor], dynamic: list[Tensor]) -> list[Tensor]:
    """Makes fake tensors; those of `dynamic` have a symbol for the number of their rows."""
    mode, kinds = FakeTensorMode(shape_env=ShapeEnv()), [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    made = []
    for one in tensors:
        has = any(one is other for other in dynamic)
        context = StatelessSymbolicContext(kinds) if has else None
        made.append(mode.from_tensor(one, symbolic_context=context, static_shapes=not has))
    return made
