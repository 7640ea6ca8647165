"""The backwards that programs write by hand. Dynamo makes two bodies of an `autograd.Function`, one a direction, and the
products of the second are of gradients, which look like any other activation there: a layer's rule would cast them as
one. So no rule reads such a body, nor the graph that compiled autograd captures, and the report names its products that
a layer's backward has too."""

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.pre_grad.sites import products
from te_inductor.passes.pre_grad.sites.products import Product

BY_HAND = Refusal("in the backward of an autograd.Function, which says itself what it multiplies in which precision")


def backwards(bodies: Bodies) -> list[fx.Graph]:
    """The graphs whose products are of gradients."""
    if not compat.captures_a_backward():
        return bodies.by_hand
    return [module.graph for module in bodies.root.modules() if isinstance(module, fx.GraphModule)]


def products_by_hand(bodies: Bodies) -> Iterator[tuple[Product, str, fx.Node, fx.Node]]:
    """The products of such graphs with a weight, and those that make parameters' gradients alone: which GEMM of a layer
    each is, the weight, and the node of the module that it belongs to."""
    for graph in backwards(bodies):
        call = bodies.backwards.get(graph)
        makes = {} if call is None else _made_for(graph, call)
        for node in graph.nodes:
            product = products.read(node)
            if product is None:
                continue
            weight = next((one for one in product.operands if from_parameter(one, bodies)), None)
            if weight is not None:
                yield product, "dgrad", weight, call or node
            elif makes.get(node) and all(from_parameter(one, bodies) for one in makes[node]):
                yield product, "wgrad", makes[node][0], call or node


def _made_for(graph: fx.Graph, call: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """The operands of the function of whose gradients each node of its backward is a part."""
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    gradients: Any = pytree.arg_tree_leaves(*graph.output_node().args)
    for gradient, operand in zip(gradients, call.args[2:], strict=False):
        if isinstance(gradient, fx.Node) and isinstance(operand, fx.Node):
            found.setdefault(gradient, {})[operand] = None
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes if node.op != "output" else ():
            found.setdefault(source, {}).update(found.get(node, {}))
    return {node: list(operands) for node, operands in found.items()}
