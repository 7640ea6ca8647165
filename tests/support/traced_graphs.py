"""Joint graphs of a step, traced with the layers in low precision and without."""

import pytest

from te_inductor import ops, recipes


def low(recipe):
    slots = recipes.resolve(recipe).slots()

    def linear(x, weight, bias=None):
        return ops.linears(x, [weight], [] if bias is None else [bias], slots, x.dtype)[0]

    return linear


def in_high_precision(graph) -> list[str]:
    names = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm")
    return [node.name for node in graph.graph.nodes if str(node.target).startswith(names)]


def joint_of(model, x, stack):
    aot_autograd = pytest.importorskip("torch._functorch.aot_autograd")
    if not hasattr(aot_autograd, "aot_export_joint_with_descriptors"):
        pytest.skip("this torch exports no joint graphs")
    return aot_autograd, aot_autograd.aot_export_joint_with_descriptors(stack, model, (x,))
