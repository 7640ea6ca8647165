"""Graphs of steps and of layers, traced with the layers in low precision and without, and the operators that they have."""

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from te_inductor import recipes
from tests.support.layers import linears


def low(recipe):
    slots = recipes.resolve(recipe).slots()

    def linear(x, weight, bias=None):
        return linears(x, [weight], [] if bias is None else [bias], slots, x.dtype)[0]

    return linear


def in_high_precision(graph) -> list[str]:
    names = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm")
    return [node.name for node in graph.graph.nodes if str(node.target).startswith(names)]


def joint_of(model, x, stack):
    aot_autograd = pytest.importorskip("torch._functorch.aot_autograd")
    if not hasattr(aot_autograd, "aot_export_joint_with_descriptors"):
        pytest.skip("this torch exports no joint graphs")
    return aot_autograd, aot_autograd.aot_export_joint_with_descriptors(stack, model, (x,))


def fakes(tensors: list[Tensor], dynamic: list[Tensor]) -> list[Tensor]:
    """Makes fake tensors; those of `dynamic` have a symbol for the number of their rows."""
    mode, kinds = FakeTensorMode(shape_env=ShapeEnv()), [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    made = []
    for one in tensors:
        has = any(one is other for other in dynamic)
        context = StatelessSymbolicContext(kinds) if has else None
        made.append(mode.from_tensor(one, symbolic_context=context, static_shapes=not has))
    return made


def called(program) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def ours(program) -> set[str]:
    return {name for name in called(program) if name.startswith("te_inductor")}
