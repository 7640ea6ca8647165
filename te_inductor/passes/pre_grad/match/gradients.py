"""Which products of a traced forward and backward belong to one layer.

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
is not known whether it is a forward's."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import name
from te_inductor.passes.pre_grad.decide.support import is_tensor, value
from te_inductor.passes.pre_grad.match.rule import Call, Gradients
from te_inductor.passes.pre_grad.plan import Candidate, Plan

_TRANSPOSES = frozenset("t permute transpose numpy_T".split())
_SAME = frozenset("detach alias contiguous clone lift_fresh_copy".split())
_FLATTENS = frozenset("view reshape _unsafe_view".split())

UNKNOWN_PLACE = Refusal("several products of the backward fit this layer, or it may be one of another's backward")


class Matrix(NamedTuple):
    """An operand, by the tensor whose elements it has: that of (..., C) as (R, C), or the transpose of this."""

    root: fx.Node
    transposed: bool

    @property
    def t(self) -> "Matrix":
        return Matrix(self.root, not self.transposed)


def matrix(node: fx.Node) -> Matrix:
    transposed = False
    while node.op == "call_function" and node.args and is_tensor(node.args[0]):
        before, called = node.args[0], name(node)
        if called in _TRANSPOSES and value(before).dim() == value(node).dim() == 2:
            transposed ^= value(node).shape != value(before).shape or _swaps(node)
        elif called in _FLATTENS:
            kept = (
                statically_known_true(value(before).shape[-1] == value(node).shape[-1])
                if value(before).dim()
                else False
            )
            if not kept or value(node).dim() != 2 or value(before).dim() < 2:
                break
        elif called not in _SAME:
            break
        node = before
    return Matrix(node, transposed)


def _swaps(node: fx.Node) -> bool:
    """Whether a transposition of a square matrix is one."""
    if name(node) == "permute":
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr, operator]
    return name(node) != "transpose" or node.args[1] % 2 != node.args[2] % 2  # type: ignore[operator]


@dataclass
class _Products:
    """The products of two matrices in a graph, in order."""

    operands: dict[fx.Node, tuple[Matrix, Matrix]] = field(default_factory=dict)
    taken: set[fx.Node] = field(default_factory=set)  # of some layer's backward

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
            if b == w.t:
                dgrads.setdefault(a, node)
            if b == x and _rows(node) == _columns(site):
                wgrads.setdefault(a.t, (node, False))
            elif a == x.t and _columns(node) == _columns(site):
                wgrads.setdefault(b, (node, True))
        for dy in dict.fromkeys((*dgrads, *wgrads)):
            dgrad, (wgrad, turned) = dgrads.get(dy), wgrads.get(dy, (None, False))
            if dgrad is not wgrad:
                yield Gradients(*_held(dgrad, wgrad, turned), dgrad, wgrad, turned)


def _held(dgrad: fx.Node | None, wgrad: fx.Node | None, turned: bool) -> tuple[fx.Node, bool]:
    """The operand that is dy, and whether it is its transpose."""
    if dgrad is not None:
        return _operands(dgrad)[0], False
    assert wgrad is not None
    a, b = _operands(wgrad)
    return (b, False) if turned else (a, True)


def match_gradients(plan: Plan) -> None:
    """Give each layer its backward, and take what is one of a backward from the sites: Note [Triples of products]."""
    products = _Products()
    for node in plan.gm.graph.nodes:
        if _is_product(node):
            a, b = _operands(node)
            products.operands[node] = matrix(a), matrix(b)
    sites = [site for site in plan.candidates if site.match.node in products.operands]
    for both in (True, False):
        for site in sites:
            if site.match.gradients is not None or site.match.node in products.taken:
                continue
            fitting = list(products.gradients(site.match.node))
            if both:
                fitting = [one for one in fitting if len(one.nodes) == 2]
            chosen = _chosen(site, fitting)
            if chosen is not None:
                products.taken.update(chosen.nodes)
                site.match = replace(site.match, gradients=chosen)
            elif fitting and not both:
                site.unplaced = UNKNOWN_PLACE
    plan.candidates[:] = [site for site in plan.candidates if site.match.node not in products.taken]
    _refuse_unplaced(plan, products)


def _chosen(site: Candidate, fitting: list[Gradients]) -> Gradients | None:
    if len(fitting) > 1:
        number = site.match.node.meta.get("seq_nr")
        fitting = [one for one in fitting if number is not None and one.nodes[0].meta.get("seq_nr") == number]
    return fitting[0] if len(fitting) == 1 else None


def _refuse_unplaced(plan: Plan, products: _Products) -> None:
    """Products with the weight of others that are the other way round than these, and no part of a backward."""
    forward: dict[fx.Node, set[bool]] = {}
    uses: dict[fx.Node, set[bool]] = {}
    for site in plan.candidates:
        if site.match.node in products.operands:
            _, w = products.operands[site.match.node]
            uses.setdefault(w.root, set()).add(w.transposed)
            if site.match.gradients is not None:
                forward.setdefault(w.root, set()).add(w.transposed)
    for site in plan.candidates:
        if site.match.node in products.operands and site.match.gradients is None:
            _, w = products.operands[site.match.node]
            if w.transposed not in forward.get(w.root, uses[w.root]) or len(uses[w.root]) > 1:
                site.unplaced = UNKNOWN_PLACE


def _is_product(node: fx.Node) -> bool:
    call = Call.read(node)
    return call is not None and call.name in ("mm", "addmm") and all(is_tensor(one) for one in _operands(node))


def _operands(node: fx.Node) -> list[fx.Node]:
    call = Call.read(node)
    assert call is not None
    return [call.operands[key] for key in (("mat1", "mat2") if call.name == "addmm" else ("input", "mat2"))]


def _rows(node: fx.Node) -> int | torch.SymInt:
    return value(node).shape[0]


def _columns(node: fx.Node) -> int | torch.SymInt:
    return value(node).shape[1]
