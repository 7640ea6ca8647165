"""The pass that has attention computed as was decided: the mask that the program made is then read by nobody, and is not
computed."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from te_inductor import compat, ops
from te_inductor.ops import masked_attention
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.aliases import is_opaque
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.operators import Kind
from te_inductor.passes.graph.tracing import method, traced_into
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.attention.expressions import Expr, Symbols, expression, is_one
from te_inductor.passes.pre_grad.attention.site import Attention
from te_inductor.passes.pre_grad.attention.trees import Writer
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.runtime.attention import kept, predicate


def rewrite_attention(plan: Plan) -> None:
    """Rewrite every place whose mask is proven to be what another kernel takes."""
    masks = _Masks(Bodies(plan.gm), Symbols(plan.gm.graph))
    for site in plan.attention:  # while what reads each output is what the program wrote
        site.keeps_strides = site.is_changed and _strides_are_read(site.call.node)
        site.is_written = site.is_changed and plan.writes.anywhere(site.call.node)
    for site in reversed(plan.attention):  # whose operands may be what one in front of it computes
        if site.is_changed:
            site.call.q, site.call.k, site.call.v = _cast(site)
        if site.is_changed and site.ends_early:
            site.call.k, site.call.v = (_first_keys(one, site) for one in (site.call.k, site.call.v))
        if site.is_changed:
            _take(site, _CALLS[site.kernel](site, masks))
    if any(site.is_changed for site in plan.attention):
        for module in plan.graph_modules():
            module.recompile()
        del plan.writes  # which was asked for in front of these nodes


def _cast(site: Attention) -> list[fx.Node]:
    """Returns q, k and v in the dtype of the output, which is autocast's where the program is in such a region: torch's
    function casts all three there, and no kernel of ours does."""
    dtype = value(site.call.node).dtype
    with site.call.node.graph.inserting_before(site.call.node):
        return [one if value(one).dtype is dtype else method(one, "to", dtype) for one in site.call.operands]


def _first_keys(tensor: fx.Node, site: Attention) -> fx.Node:
    """Takes as many of k or v as there are queries."""
    with site.call.node.graph.inserting_before(site.call.node):
        whole = slice(None)
        index = (whole, whole, slice(None, _length(site.call.q)))
        first = site.call.node.graph.call_function(operator.getitem, (tensor, index))
    example = value(tensor)
    with example.fake_mode:  # type: ignore[attr-defined]
        first.meta = dict(tensor.meta) | {"example_value": example[:, :, : value(site.call.q).shape[2]]}
    return first


def _insert(site: Attention, op: Any, *operands: Any, **options: Any) -> fx.Node:
    """A call with q, k and v, and operands behind them, in front of what takes its place."""
    node = site.call.node
    with node.graph.inserting_before(node):
        return node.graph.call_function(op, (*site.call.operands, *operands), options)


def _call_plainly(site: Attention, masks: "_Masks") -> fx.Node:
    """torch's function, without a mask. `F` may have another under its name, inside of `context_parallel`."""
    groups = {"enable_gqa": True} if site.call.grouped else {}
    given: Any = {"dropout_p": site.call.dropout, "is_causal": site.kernel == "causal", "scale": site.call.scale}
    return _insert(site, torch._C._nn.scaled_dot_product_attention, **given, **groups)


def _call_in_fixed_order(site: Attention, masks: "_Masks") -> fx.Node:
    """Attention whose products are summed in one order."""
    return _insert(site, ops.fixed_attention, site.call.given, site.call.causal, site.call.known_scale)


def _call_of_few(site: Attention, masks: "_Masks") -> fx.Node:
    """Attention of few queries, whose mask is of the keys alone."""
    call, node = site.call, site.call.node
    with node.graph.inserting_before(node):
        keep = None if call.given is None else method(call.given, "flatten", 0, -2)
    return _insert(site, ops.decode_attention, keep, call.known_scale, True)


@dataclass
class _Masks:
    """The block masks and the questions of one graph: each once, for all layers that ask."""

    bodies: Bodies
    symbols: Symbols
    made: dict[Any, list[fx.Node]] = field(default_factory=dict)

    def tensors(self, site: Attention, numbers: Sequence[Expr]) -> list[fx.Node]:
        """What a site's predicate reads, in the order of `trees.Writer`."""
        found = [self._leaf(node, site.proof.readers.get(called)) for called, node in site.proof.leaves.items()]
        device = value(site.call.q).device

        def full(_: Any, sizes: Sequence[Any]) -> list[Tensor]:
            return [torch.full((), sizes[0], dtype=torch.int64, device=device)]

        return [
            *found,
            *(self._computed(("number", number, device), [], [number], site, full)[0] for number in numbers),
        ]

    def block_mask(
        self, site: Attention, tree: Any, tensors: list[fx.Node], hides_nothing: fx.Node | None = None
    ) -> list[fx.Node]:
        """The block mask; with `hides_nothing` it is not computed where that is so."""

        def blocks(tree: Any, given: Sequence[Tensor], sizes: Sequence[Any], device: torch.device) -> list[Tensor]:
            given, asked = given[: len(tensors)], given[len(tensors) :]
            if not asked and all(isinstance(size, int) for size in sizes):
                return predicate.block_mask(tree, given, sizes, device)
            like = torch.empty((), dtype=torch.bool, device=device)
            return masked_attention.block_mask(list(given), like, predicate.to_text(tree), list(sizes), *asked)  # type: ignore[no-any-return]

        flags = [] if hides_nothing is None else [hides_nothing]
        return self._made(site, "blocks", tree, [*tensors, *flags], blocks)

    def empty_rows(self, site: Attention, tree: Any, tensors: list[fx.Node], index: Sequence[str]) -> fx.Node:
        """The rows without a key, with a dimension for each place of `index`."""

        def rows(*asked: Any) -> list[Tensor]:
            return [
                predicate.empty_rows(*asked).squeeze([dim for dim, place in enumerate("bhq") if place not in index])
            ]

        return self._made(site, "empty", tree, tensors, rows)[0]

    def rows_of_kept(self, site: Attention, tree: Any, tensors: list[fx.Node]) -> list[fx.Node]:
        return self._made(site, "kept", tree, tensors, kept.rows_of_kept)

    def hides_nothing(self, site: Attention, data: Any, tensors: list[fx.Node]) -> fx.Node:
        def asked(tree: Any, given: Sequence[Tensor], sizes: Sequence[Any], _: torch.device) -> list[Tensor]:
            return [masked_attention.hides_nothing(list(given), predicate.to_text(tree), list(sizes))]

        return self._made(site, "hides", data, tensors, asked)[0]

    def hand(self, nodes: Sequence[fx.Node], site: Attention) -> list[fx.Node]:
        """Nodes of the root's graph, as the site's has them."""
        return [self.bodies.hand(node, site.call.node.graph) for node in nodes]

    def _made(self, site: Attention, what: str, tree: Any, tensors: list[fx.Node], compute: Any) -> list[fx.Node]:
        """Makes nodes in the root's graph, behind what they read."""
        sizes = list(map(expression, site.proof.mask.scores.sizes))  # type: ignore[union-attr]
        device = value(site.call.q).device
        key = (what, predicate.to_text(tree), *tensors, *sizes, device)
        return self._computed(
            key, tensors, sizes, site, lambda given, known: compute(tree, given, tuple(known), device)
        )

    def _computed(
        self, key: Any, tensors: list[fx.Node], sizes: list[Expr], site: Attention, compute: Any
    ) -> list[fx.Node]:
        """What `compute` returns for tensors and sizes."""
        if key in self.made:
            return self.made[key]
        operands = [*tensors, *self.symbols.operands(sizes)]

        def computed(*given: Any) -> Any:
            return compute(given[: len(tensors)], self.symbols.values(sizes, given[len(tensors) :]))

        place = self._behind(operands)
        with place.graph.inserting_before(place):
            mode = value(site.call.q).fake_mode  # type: ignore[attr-defined]
            self.made[key] = traced_into(place.graph, computed, operands, place, mode)
        return self.made[key]

    def _behind(self, operands: Sequence[fx.Node]) -> fx.Node:
        """The node of the root's graph behind its inputs and operands."""
        last = next(reversed(self.bodies.root.graph.find_nodes(op="placeholder")), None)
        return max(filter(None, (last, *operands))).next

    def _leaf(self, node: fx.Node, reader: fx.Node | None) -> fx.Node:
        """A tensor of the graph; a copy where the graph writes it, as it is when `reader` reads it."""
        if reader is None:
            return node
        key = ("leaf", node, reader)
        if key not in self.made:
            with node.graph.inserting_before(reader):
                self.made[key] = traced_into(node.graph, lambda one: [one.clone()], [node], reader)
        return self.made[key][0]


def _call_flex(site: Attention, masks: _Masks) -> fx.Node:
    mask = site.proof.mask
    assert mask is not None
    writer = Writer(site.proof.leaves)
    tree, scored = writer.write(mask.conditions), list[fx.Node]()
    alone = writer.write(site.proof.alone)
    tensors = masks.tensors(site, writer.numbers)
    rows = [place for place in "bhq" if place == "q" or place in predicate.places_of(tree)]
    if site.attends_to_all:
        empty = masks.empty_rows(site, tree, tensors, rows)
        shared: Any = ["ne", ["at", len(tensors), *rows], 0]
        tree = ["or", tree, ["and", shared, alone] if site.proof.alone else shared]
        tensors, scored = [*tensors, empty], [empty]
    blocks = masks.hand(masks.block_mask(site, tree, tensors), site)
    graph = site.call.node.graph
    module: Any = graph.owning_module
    fakes = [value(block) for block in blocks]
    q, k, v = map(value, site.call.operands)
    layout, options = compat.flex_constants(q, k, v, fakes, predicate.BLOCK)
    with graph.inserting_before(site.call.node):
        biases = _biases(site)
        scoring = _score(site, rows if scored else None, len(biases))
        score = graph.get_attr(_added(module, "te_score", scoring))
        attends = graph.get_attr(_added(module, "te_attends", _attends(tree, len(tensors))))
        nodes = {id(fake): block for fake, block in zip(fakes, blocks, strict=True)}
        lengths = [_length(one) for one in (site.call.q, site.call.k)]
        given: Any = (*lengths, *(attends if one is compat.MASK_MOD else nodes.get(id(one), one) for one in layout[2:]))
        buffers = (*masks.hand(scored, site), *biases), tuple(masks.hand(tensors, site))
        flex = torch.ops.higher_order.flex_attention
        call = _insert(site, flex, score, given, site.call.known_scale, options, *buffers)
        out, sums = (graph.call_function(operator.getitem, (call, place)) for place in range(2))
    example, sum_example = _examples(site)
    _hold(call, site, (example, sum_example, sum_example))
    _hold(out, site, example)
    _hold(sums, site, sum_example)
    if site.call.sinks is not None:
        with graph.inserting_before(site.call.node):
            [out] = traced_into(graph, _with_sinks, [out, sums, site.call.sinks], site.call.node)
    return out


def _with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> list[Tensor]:
    """What is left of attention's output where another score takes a part of the weights. FlexAttention has logarithms
    of base 2."""
    share = torch.sigmoid(sums.unsqueeze(-1) * math.log(2.0) - sinks.float())
    return [(out.float() * share).to(out.dtype)]


def _length(tensor: fx.Node) -> Any:
    """How many tokens a tensor (B, H, L, D) has, as an argument."""
    size = value(tensor).shape[2]
    if isinstance(size, int):
        return size
    node = tensor.graph.call_function(torch.ops.aten.sym_size.int, (tensor, 2))
    node.meta["example_value"] = size
    return node


def _call_either(site: Attention, masks: _Masks) -> fx.Node:
    mask = site.proof.mask
    assert mask is not None
    writer = Writer(site.proof.leaves)
    tree, data = writer.write(mask.conditions), writer.write(mask.data)
    tensors = masks.tensors(site, writer.numbers)
    flag = masks.hides_nothing(site, data, tensors)
    blocks = masks.block_mask(site, tree, tensors, flag)
    given = (*masks.hand([flag], site), masks.hand(tensors, site), masks.hand(blocks, site))
    about = predicate.to_text(tree), site.call.known_scale, mask.without_data.is_causal
    call = _insert(site, masked_attention.attend, *given, *about)
    _hold(call, site, _examples(site))
    with call.graph.inserting_after(call):
        return call.graph.call_function(operator.getitem, (call, 0))


def _call_kept(site: Attention, masks: _Masks) -> fx.Node:
    """Attention with dropout to the keys that a padding keeps."""
    assert site.proof.mask is not None
    writer = Writer(site.proof.leaves)
    tree = writer.write(site.proof.mask.conditions)
    rows = masks.hand(masks.rows_of_kept(site, tree, masks.tensors(site, writer.numbers)), site)
    return _insert(site, masked_attention.attend_to_kept, *rows, site.call.dropout, site.call.known_scale)


# What computes attention in the place of a site's, by the kernel that was decided on.
_CALLS = {
    "plain": _call_plainly,
    "causal": _call_plainly,
    "flex": _call_flex,
    "either": _call_either,
    "kept": _call_kept,
    "fixed": _call_in_fixed_order,
    "few": _call_of_few,
}


def _examples(site: Attention) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, D of v), and the logarithms of its rows' sums, as fake tensors."""
    q, example = value(site.call.q), value(site.call.node)
    with q.fake_mode:  # type: ignore[attr-defined]
        if example.dim() == 3:
            example = example.unflatten(0, q.shape[:2])  # type: ignore[no-untyped-call]
        return example, q.new_empty(q.shape[:3], dtype=torch.float32)


def _hold(node: fx.Node, site: Attention, example: Any) -> None:
    node.meta = dict(site.call.node.meta) | {"example_value": example}


def _take(site: Attention, out: fx.Node) -> None:
    """Have what attention returned take the place of its output."""
    expected = value(site.call.node)
    with site.call.node.graph.inserting_before(site.call.node):
        _hold(out, site, _examples(site)[0])
        out = method(out, "flatten", 0, 1) if expected.dim() == 3 else out
        if site.keeps_strides:
            order = sorted(range(expected.dim()), key=expected.stride, reverse=True)
            out = method(method(out, "permute", order), "contiguous")
            out = method(out, "permute", sorted(range(len(order)), key=order.__getitem__))
        if site.is_written:  # unlike a product's, the backward of attention reads its output
            out = method(out, "clone")
    _hold(out, site, expected)
    site.call.node.replace_all_uses_with(out)
    site.call.node.graph.erase_node(site.call.node)


def _strides_are_read(node: fx.Node) -> bool:
    """Whether something counts on the strides that a tensor was traced with, as `view` does where it merges dimensions."""
    for user in node.users:
        called, kind, _ = operators.read(user)
        splits = called == "view" and value(node).dim() == 3 and value(user).shape[-2:] == value(node).shape[-2:]
        if is_opaque(user) or kind is Kind.BITS or (called in _OF_STRIDES and not splits):
            return True
        if kind in Kind.VIEW and _strides_are_read(user):
            return True
    return False


_OF_STRIDES = frozenset("view view_as _unsafe_view as_strided stride is_contiguous".split())


def _biases(site: Attention) -> list[fx.Node]:
    """The bias that is added to the scores, without the dimensions in which it is broadcast; in fp32 where its gradient, a
    sum over all queries and keys that read an element, is wanted."""
    bias = site.call.added.bias
    if bias is None:
        return []
    if value(bias).requires_grad:
        bias = method(bias, "float")
    alike = tuple(dim for dim, size in enumerate(value(bias).shape) if is_one(size))
    return [method(bias, "squeeze", alike) if alike else bias]


def _places_of_bias(site: Attention) -> str:
    """The places on which the bias depends, in the order of its dimensions."""
    shape = () if site.call.added.bias is None else value(site.call.added.bias).shape
    return "".join(place for place, size in zip("bhqk"[4 - len(shape) :], shape, strict=True) if not is_one(size))


def _score(site: Attention, rows: Sequence[str] | None, biases: int) -> fx.GraphModule:
    """What is done to a score: a soft cap, and a bias; and in a row without any key, whose scores vanish beside the
    smallest number, zero, with the gradient of what that number is added to. `rows` are the places that say which."""
    graph, given = fx.Graph(), [f"bias_{number}" for number in range(biases)]
    places = _inputs(graph, ["score", "b", "h", "q", "k", *([] if rows is None else ["empty"]), *given])
    score = places["score"]
    if site.call.softcap is not None:
        score = torch.tanh(score / site.call.softcap) * site.call.softcap
    biased = score
    for bias in map(places.__getitem__, given):
        read = tuple(places[place] for place in _places_of_bias(site))
        biased = biased + (bias[read] if read else bias) * site.call.added.scale
    if rows is not None:
        added, learns = site.call.added, score if site.call.added.replaces("bias") else biased
        is_empty, zero = places["empty"][tuple(places[place] for place in rows)], learns - learns.detach()
        if site.proof.learns:
            zero = torch.where(predicate.evaluate(Writer({}).write(site.proof.learns), places, []), zero, 0.0)
        biased = torch.where(is_empty, 0.0 if added.replaces("scores") and not site.proof.alone else zero, biased)
    graph.output(biased.node)
    return fx.GraphModule({}, graph)


def _attends(tree: Any, tensors: int) -> fx.GraphModule:
    """The predicate as FlexAttention calls it."""
    graph = fx.Graph()
    places = _inputs(graph, "bhqk")
    given = _inputs(graph, [f"tensor_{place}" for place in range(tensors)])
    graph.output(predicate.evaluate(tree, places, list(given.values())).node)
    return fx.GraphModule({}, graph)


def _inputs(graph: fx.Graph, names: Iterable[str]) -> dict[str, Any]:
    """Inputs of a graph, by their names, with which Python computes nodes of it."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    return {name: fx.Proxy(graph.placeholder(name), tracer) for name in names}


def _added(module: fx.GraphModule, called: str, made: fx.GraphModule) -> str:
    number = 0
    while hasattr(module, f"{called}_{number}"):
        number += 1
    module.add_module(f"{called}_{number}", made)
    return f"{called}_{number}"
