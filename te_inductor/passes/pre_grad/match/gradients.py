"""The products of a traced forward and backward that belong to one layer.

# Note [Triples of products]
Autograd has made three products of ``y = x wᵀ`` where make_fx or AOTAutograd has traced both directions, and nothing in
the graph says so::

    fprop  y[M,N]  = x[M,K] wᵀ
    dgrad  dx[M,K] = dy[M,N] w         w the other way round than in fprop
    wgrad  dw[N,K] = dyᵀ x             or dwᵀ[K,N] = xᵀ dy

So they are found by their operands. A dgrad of w names a dy, and so does a wgrad of x; a layer's dy is the one that both
name, which tells q, k and v of one x apart, and the uses of a tied weight. Layers with both go first. Then those with one
of the two, whose x or weight wants no gradient. Where several fit, autograd's own number of the forward op (`seq_nr`),
which a trace keeps if it was asked to, decides; else the layer is refused, as is a product with a weight of which it
is not known whether it is a forward's.

Experts' products are the same, w and dw being (E, N, K), with the same ends of groups in all three. transformers' op for
products that torch has not makes both gradients in one call, which names x, w and dy."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Call, Kind, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import Writes, chain
from te_inductor.passes.pre_grad.plan import Candidate, Plan, SitePlace, Unlowered
from te_inductor.passes.pre_grad.sites import grouped
from te_inductor.passes.pre_grad.sites import products as products_of
from te_inductor.passes.pre_grad.sites.part import Backward, Gradients
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.paths import without_wrappers

UNKNOWN_PLACE = Refusal("several products of the backward fit this layer, or it may be one of another's backward")
WRITTEN = Refusal("the graph writes what its products read in between, so that its forward and its backward read two")
LOST = Refusal(
    "the weight gradient multiplies other tensors than the forward, as where ranks redistribute them in between"
)


class Matrix(NamedTuple):
    """An operand, by the tensor whose elements it has: that of (..., C) as (R, C), or the transpose of this; of experts
    (E, R, C), or the transpose of each."""

    root: fx.Node
    transposed: bool

    @property
    def t(self) -> "Matrix":
        return Matrix(self.root, not self.transposed)


def matrix(node: fx.Node) -> Matrix:
    transposed = False
    while node.op == "call_function" and node.args and is_tensor(node.args[0]):
        before, kind = node.args[0], operators.read(node).kind
        if kind is Kind.PERMUTE and value(before).dim() == value(node).dim() in (2, 3):
            swapped = operators.swaps(node)
            if swapped is None:
                break
            transposed ^= swapped
        elif kind is Kind.RESHAPE:
            kept = (
                statically_known_true(value(before).shape[-1] == value(node).shape[-1])
                if value(before).dim()
                else False
            )
            if not kept or value(node).dim() != 2 or value(before).dim() < 2:
                break
        elif kind not in Kind.SAME | Kind.COPY:
            break
        node = before
    return Matrix(node, transposed)


class _Multiplied(NamedTuple):
    """What a product multiplies."""

    a: fx.Node
    b: fx.Node
    ends: fx.Node | None = None  # where groups of rows end, or of columns of both


@dataclass
class _Products:
    """The products of two matrices in a graph, in order."""

    multiplied: dict[fx.Node, _Multiplied] = field(default_factory=dict)
    operands: dict[fx.Node, tuple[Matrix, Matrix]] = field(default_factory=dict)
    pairs: list[fx.Node] = field(default_factory=list)  # calls that make dx and dw of experts
    taken: set[fx.Node] = field(default_factory=set)  # of some layer's backward

    def add(self, node: fx.Node) -> None:
        made = _multiplied(node)
        if made is not None:
            self.multiplied[node], self.operands[node] = made, (matrix(made.a), matrix(made.b))
        elif name(node) == "grouped_mm_fallback_backward":
            self.pairs.append(node)

    def gradients(self, site: fx.Node) -> Iterator[Gradients]:
        """The backwards that a layer may have, by their dy."""
        x, w = self.operands[site]
        dgrads: dict[Matrix, fx.Node] = {}
        wgrads: dict[Matrix, tuple[fx.Node, bool]] = {}
        behind = False
        for node, (a, b) in self.operands.items():
            behind |= node is site
            if not behind or node is site or node in self.taken:
                continue
            if self.multiplied[node].ends is not self.multiplied[site].ends:
                continue
            if b == w.t:
                dgrads.setdefault(a, node)
            rows, columns = value(node).shape[-2:]
            if b == x and rows == value(site).shape[-1]:
                wgrads.setdefault(a.t, (node, False))
            elif a == x.t and columns == value(site).shape[-1]:
                wgrads.setdefault(b, (node, True))
        for dy in dict.fromkeys((*dgrads, *wgrads)):
            dgrad, (wgrad, turned) = dgrads.get(dy), wgrads.get(dy, (None, False))
            if dgrad is not wgrad:
                yield Gradients(*self._held(dgrad, wgrad, turned), dgrad, wgrad, turned)
        yield from self._of_pairs(site)

    def _held(self, dgrad: fx.Node | None, wgrad: fx.Node | None, turned: bool) -> tuple[fx.Node, bool]:
        """The operand of the first of the two that is dy, and whether it is its transpose."""
        if dgrad is not None and (wgrad is None or dgrad < wgrad):
            return self.multiplied[dgrad].a, False
        assert wgrad is not None
        return (self.multiplied[wgrad].b, False) if turned else (self.multiplied[wgrad].a, True)

    def _of_pairs(self, site: fx.Node) -> Iterator[Gradients]:
        """Backwards that are one call with the layer's own operands."""
        for node in self.pairs:
            x, w, ends, dy = node.args
            if node < site or (matrix(x), matrix(w), ends) != (*self.operands[site], self.multiplied[site].ends):  # type: ignore[arg-type]
                continue
            made = {user.args[1]: user for user in node.users if user.users}
            if made and not self.taken & set(made.values()):
                yield Gradients(dy, False, made.get(0), made.get(1), wgrad_transposed=True)  # type: ignore[arg-type]


def match_gradients(plan: Plan) -> None:
    """Give each layer its backward, and take what is one of a backward from the sites: Note [Triples of products]."""
    products = _Products()
    for node in plan.gm.graph.nodes:
        products.add(node)
    sites = [site for site in plan.candidates if site.match.node in products.operands]
    for both in (True, False):
        for site in sites:
            node = site.match.node
            if site.match.gradients is not None or node in products.taken or _is_marked_backward(node):
                continue
            fitting = list(products.gradients(node))
            if both:
                fitting = [one for one in fitting if len(one.nodes) == 2]
            chosen = _chosen(site, fitting)
            if chosen is not None:
                products.taken.update(chosen.nodes)
                unplaced = WRITTEN if _are_written(node, chosen, plan.writes) else None
                site.match = site.match.having(Backward(chosen, unplaced))
            elif fitting and not both:
                _unplace(site)
    plan.candidates[:] = [site for site in plan.candidates if site.match.node not in products.taken]
    plan.products.backward |= products.taken
    _refuse_unplaced(plan, products)
    for site in plan.candidates:
        site.match = _read_once(site.match, plan.writes)


def list_lost_gradients(plan: Plan) -> None:
    """List the products that make a parameter's gradient alone, as AOTAutograd describes the graph's outputs, and are no
    layer's."""
    sites = {site.match.node for site in plan.candidates}
    reached: dict[fx.Node, set[int]] = {}
    for place, node in enumerate(pytree.arg_tree_leaves(*plan.gm.graph.output_node().args)):
        if isinstance(node, fx.Node):
            reached.setdefault(node, set()).add(place)
    described = plan.gm.graph.output_node().meta.get("desc", ())
    for node in reversed(plan.gm.graph.nodes):
        found = reached.get(node, set()).union(*(reached[user] for user in node.users if user in reached))
        reached[node] = found
        if len(found) != 1 or node in sites or node in plan.products.backward or _multiplied(node) is None:
            continue
        parameter = getattr(getattr(_at(described, *found), "grad_of", None), "target", None)
        product = products_of.read(node)
        if isinstance(parameter, str) and product is not None:
            path = without_wrappers(parameter).removesuffix(".weight")
            plan.products.unlowered.append(Unlowered(product, SitePlace("", path), LOST, "wgrad"))


def _at(described: Any, place: int) -> Any:
    flat = pytree.tree_leaves(described)
    return flat[place] if place < len(flat) else None


def _chosen(site: Candidate, fitting: list[Gradients]) -> Gradients | None:
    if len(fitting) > 1:
        number = site.match.node.meta.get("seq_nr")
        fitting = [one for one in fitting if number is not None and one.nodes[0].meta.get("seq_nr") == number]
    return fitting[0] if len(fitting) == 1 else None


def _are_written(site: fx.Node, gradients: Gradients, writes: Writes) -> bool:
    """Whether anything writes what the products of a layer read, or what that is a copy of, between the first read and the
    last."""
    calls = [site, *(node.args[0] if node.target is operator.getitem else node for node in gradients.nodes)]
    read = [one for call in calls for one in call.all_input_nodes if is_tensor(one)]  # type: ignore[union-attr]
    roots = [matrix(one).root for one in read]
    copies = [node for one, root in zip(read, roots, strict=True) for node in chain(one, root)]
    last: fx.Node = max(calls)  # type: ignore[type-var, assignment]
    return writes.between([*read, *copies, *roots], min([site, *copies]), last)


def _refuse_unplaced(plan: Plan, products: _Products) -> None:
    """Layers of whose backward both products are not known, and that may be part of another's: those with a weight that
    others use the other way round, and those that AOTAutograd has marked."""
    weights = {
        site.match.node: _of_parameter(products.operands[site.match.node][1])
        for site in plan.candidates
        if site.match.node in products.operands
    }
    forward: dict[fx.Node, set[bool]] = {}
    uses: dict[fx.Node, set[bool]] = {}
    sites = [site for site in plan.candidates if site.match.node in weights]
    for site in sites:
        w = weights[site.match.node]
        uses.setdefault(w.root, set()).add(w.transposed)
        if site.match.gradients is not None:
            forward.setdefault(w.root, set()).add(w.transposed)
    for site in sites:
        w, gradients = weights[site.match.node], site.match.gradients
        both_ways = len(uses[w.root]) > 1
        if gradients is None:
            if (
                both_ways
                or w.transposed not in forward.get(w.root, uses[w.root])
                or _is_marked_backward(site.match.node)
            ):
                _unplace(site)
        elif len(gradients.nodes) < 2 and both_ways:
            _unplace(site)


def _unplace(site: Candidate) -> None:
    site.match = site.match.having(Backward(site.match.gradients, UNKNOWN_PLACE))


def _is_marked_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _of_parameter(weight: Matrix) -> Matrix:
    """Names a weight by the parameter, of which ranks may gather a weight more than once."""
    node, transposed = weight
    while not isinstance(value(node), torch.nn.Parameter) and node.args and is_tensor(node.args[0]):
        node, turned = matrix(node.args[0])
        transposed ^= turned
    return Matrix(node, transposed)


def _read_once(match: Match, writes: Writes) -> Match:
    """A layer of experts and its backward, both of which read what its operands were made of, where nothing writes that
    before the backward has read it. A bias that is added behind the product stays there, as its gradient does."""
    literal, gradients = grouped.literal_of(match), match.gradients
    if literal is None:
        return match
    nodes = [match.node] if gradients is None else [match.node, *gradients.nodes]
    match = grouped.undisturbed(grouped.without_adder(match), writes, max(nodes))
    if gradients is None or gradients.wgrad is None or value(match.weight).dtype == value(literal.weight).dtype:
        return match
    cast, turned = _cast_of(gradients.wgrad, value(match.weight).dtype)
    if cast is None:  # the gradient that is wanted is that of the weight behind its cast
        return replace(match, weight=literal.weight, transposed=literal.transposed)
    turned ^= gradients.wgrad_transposed
    backward = match.part(Backward)
    assert backward is not None
    return match.having(replace(backward, gradients=replace(gradients, wgrad=cast, wgrad_transposed=turned)))


def _cast_of(gradient: fx.Node, dtype: torch.dtype) -> tuple[fx.Node | None, bool]:
    """What casts a gradient to a dtype where nothing else reads it, and whether it is the gradient's transpose."""
    node, turned = gradient, False
    while len(node.users) == 1:
        [node] = node.users
        kind = operators.read(node).kind
        if kind is Kind.CAST and is_tensor(node) and value(node).dtype == dtype:
            return node, turned
        swapped = False if kind in Kind.SAME | Kind.COPY else operators.swaps(node)
        if swapped is None:
            break
        turned ^= swapped
    return None, turned


def _multiplied(node: fx.Node) -> _Multiplied | None:
    call = Call.read(node)
    if call is not None and call.name in ("mm", "addmm"):
        found = [call.operands[key] for key in (("mat1", "mat2") if call.name == "addmm" else ("input", "mat2"))]
    else:
        given = operators.grouped_operands(node)
        found = [given.get(key) for key in ("x", "weight", "offs")]
    return _Multiplied(*found) if found[0] is not None and all(is_tensor(one) for one in found) else None  # type: ignore[arg-type]
