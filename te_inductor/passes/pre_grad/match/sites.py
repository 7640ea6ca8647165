"""The passes that find the linear layers of a graph, and its other matrix products."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import is_opaque
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import (
    holder_path,
    inner_path,
    module_path,
    parameter_name,
)
from te_inductor.passes.graph.owners import from_parameter, owner_of
from te_inductor.passes.pre_grad.plan import Candidate, Plan, SitePlace, Unlowered
from te_inductor.passes.pre_grad.sites import (
    RULES,
    attention,
    contractions,
    grouped,
    parallel,
    products,
    single_products,
)
from te_inductor.passes.pre_grad.sites.products import Product
from te_inductor.presentation.paths import without_wrappers
from te_inductor.recipes.regions import Region

# Dynamo makes two bodies of an `autograd.Function`, one a direction, and the products of the second are of gradients,
# which look like any other activation there: a layer's rule would cast them as one. So no rule reads such a body, nor
# the graph that compiled autograd captures, and the report names its products that a layer's backward has too.
_BY_HAND = Refusal("in the backward of an autograd.Function, which says itself what it multiplies in which precision")


def write_numbers(plan: Plan) -> None:
    """Put numbers in the place of the symbolic ones that torch has guarded to be constants, as dimensions are: whatever
    reads a call's arguments finds what it would find without dynamic shapes."""
    for module in plan.graph_modules():
        for node in list(module.graph.nodes):
            symbol = node.meta.get("example_value")
            number = symbol.node.maybe_as_int() if isinstance(symbol, torch.SymInt) else None
            if number is not None:
                _write_number(node, number)
        module.recompile()


def _write_number(node: fx.Node, number: int) -> None:
    for user in list(node.users):
        if user.op != "output" and not is_opaque(user):
            user.args, user.kwargs = fx.map_arg(
                (user.args, dict(user.kwargs)), lambda one: number if one is node else one
            )


def inline_attention(plan: Plan) -> None:
    """Open `F.multi_head_attention_forward`, one node for Dynamo, so that its projections can be seen."""
    for module in plan.graph_modules():
        attention.inline(module.graph)
        module.recompile()


def inline_contractions(plan: Plan) -> None:
    """Put linear layers in the place of other sums of products that are ones."""
    for module in plan.graph_modules():
        plan.products.inlined |= contractions.inline(module.graph)
        module.recompile()


def inline_single_products(plan: Plan) -> None:
    """Write batched products of one matrix each as products of matrices."""
    for module in plan.graph_modules():
        single_products.inline(module.graph)
        module.recompile()


def match_sites(plan: Plan) -> None:
    """Find every linear layer, and the region of autocast that it is in."""
    bodies = Bodies(plan.gm)
    _ = plan.regions_of  # even of a graph without layers, which may leave a region open
    for graph in _forwards(plan, bodies):
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            for rule in RULES:
                match = rule.match(node)
                if match is not None:
                    match = parallel.with_gather(parallel.with_redistributions(match, plan.writes))
                    match = grouped.undisturbed(match, plan.writes)
                    path = module_path(node)
                    inner = _inner(plan, path, node, match.weight, bodies, match.dims > 2)
                    place = SitePlace(path, inner, _around(plan, node))
                    plan.candidates.append(Candidate(rule, match, place))
                    break


def _forwards(plan: Plan, bodies: Bodies) -> list[fx.Graph]:
    """The graph and the bodies in it, but for backwards that are written by hand."""
    backwards = _backwards(bodies)
    return [module.graph for module in plan.graph_modules() if module.graph not in backwards]


def list_products(plan: Plan) -> None:
    """Find all matrix products, and those with a weight among them that no rule matched."""
    bodies = Bodies(plan.gm)
    nodes = (node for graph in _forwards(plan, bodies) for node in graph.nodes if node not in plan.products.backward)
    plan.products.all.extend(product for product in map(products.read, nodes) if product is not None)
    matched = {candidate.match.node for candidate in plan.candidates}
    layers = {product.node for product in plan.products.all if products.is_layer(product)} | matched
    weights = products.Weights(bodies, layers, lambda: plan.writes)
    for product, refusal in products.unmatched(plan.products.all, matched, weights):
        path = module_path(product.node)
        weight = next(one for one in product.operands if weights.is_weight(one))
        inner = _inner(plan, path, product.node, weight, bodies)
        plan.products.unlowered.append(Unlowered(product, SitePlace(path, inner, _around(plan, product.node)), refusal))
    for product, gemm, weight, call in _products_by_hand(bodies):
        path = module_path(call)
        place = SitePlace(path, _inner(plan, path, call, weight, bodies), _around(plan, product.node))
        plan.products.unlowered.append(Unlowered(product, place, _BY_HAND, gemm))


def _around(plan: Plan, node: fx.Node) -> tuple[Region | None, ...]:
    return tuple(plan.regions_of.get(node, [None]))


def _inner(plan: Plan, module: str, node: fx.Node, weight: fx.Node, bodies: Bodies, grouped: bool = False) -> str:
    """What a site's name has behind that of the module whose forward it is in."""
    held = owner_of(weight, bodies)
    if held is None:
        return ""
    name = plan.path_of(held.parameter)
    if name is None:
        inner = inner_path(module, holder_path(held.parameter))
        return ".".join(filter(None, (inner, parameter_name(held.parameter)))) if grouped else inner
    if not node.meta.get("nn_module_stack"):  # a trace knows no modules
        return without_wrappers(name).removesuffix(".weight")
    holder, _, parameter = without_wrappers(name).rpartition(".")
    inner = inner_path(module, holder)
    return ".".join(filter(None, (inner, parameter))) if grouped else inner


def _backwards(bodies: Bodies) -> list[fx.Graph]:
    """The graphs whose products are of gradients."""
    if not compat.captures_a_backward():
        return bodies.by_hand
    return [module.graph for module in bodies.root.modules() if isinstance(module, fx.GraphModule)]


def _products_by_hand(bodies: Bodies) -> Iterator[tuple[Product, str, fx.Node, fx.Node]]:
    """The products of such graphs with a weight, and those that make parameters' gradients alone: which GEMM of a layer
    each is, the weight, and the node of the module that it belongs to."""
    for graph in _backwards(bodies):
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
