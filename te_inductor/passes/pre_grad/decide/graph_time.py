"""How long a graph takes in bf16, roughly, on the device; and how long the host takes to launch it."""

import math

import torch
from torch import fx
from torch._inductor import config
from torch.utils import _pytree as pytree

from te_inductor import targets
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import requires_grad
from te_inductor.passes.pre_grad.decide.cast_costs import is_view
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.sites.products import hint

LAUNCHES_OF_A_GEMM = 2  # itself, and what else is launched for it: two Llama blocks have 87 launches, 42 of GEMMs
_MOVED = {False: 1, True: 2}  # times the bytes that nodes make, by whether the graph is trained
_LINK = 4e11  # bytes a second of an exchange between two H200s of one host (2026-11-26)
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def device(plan: Plan, rates: targets.Rates) -> float:
    """Seconds of all matrix products, of moving what the graph makes besides, and of rows that go to other ranks and
    back. Attention is not counted."""
    flops = sum(product.flops * _gemms(product.node) for product in plan.products.all if product.flops is not None)
    made = sum(_made(module) for module in plan.graph_modules())
    sent = sum(_made(module, "all_to_all_single") for module in plan.graph_modules())
    return flops / rates.bf16_flops + _MOVED[_learns(plan)] * (made / rates.bytes + sent / _LINK)


def host(plan: Plan, rates: targets.Rates, more: int) -> float | None:
    """Seconds that Python takes to launch the graph, with so many launches `more` than bf16 has; None where it does
    not."""
    options = plan.options
    graphs = options.inductor.get("triton.cudagraphs", options.mode in _CUDA_GRAPHS or config.triton.cudagraphs)
    if graphs or (plan.program.cpp_wrapper and not plan.leaves):
        return None
    return rates.host_launch * (LAUNCHES_OF_A_GEMM * sum(_gemms(product.node) for product in plan.products.all) + more)


def _learns(plan: Plan) -> bool:
    return any(_gemms(product.node) > 1 for product in plan.products.all)


def _gemms(node: fx.Node) -> int:
    """The GEMMs of a product: forward alone, or with its backward."""
    return 3 if requires_grad(node) else 1


def _made(module: fx.GraphModule, called: str | None = None) -> int:
    """Bytes of the tensors that its nodes, or those that are called so, compute. A symbol counts as what it was
    first."""
    return sum(
        math.prod(hint(size) or 0 for size in tensor.shape) * tensor.dtype.itemsize
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method") and not is_view(node) and called in (None, name(node))
        for tensor in pytree.tree_leaves(node.meta.get("example_value"))
        if isinstance(tensor, torch.Tensor)
    )
