"""A rule finds one form of a linear layer in a Dynamo graph: match -> check -> rewrite, without state.

`match` recognises, `check` decides (a `Refusal` is a value that says why not), `rewrite` replaces one node by
`te_inductor.linears`. A rewrite inserts OpOverload nodes only: other targets would bypass AOTAutograd's cache.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from te_inductor import compat, ops
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import Parallel
from te_inductor.ops.linear import is_turned
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.passes.pre_grad.sites.exchanges import ExchangeNodes
from te_inductor.recipes import Slots


@dataclass(frozen=True)
class Groups:
    """How the rows of a layer of experts are assigned to them, as nodes."""

    ends: fx.Node  # (E,), where each expert's rows end; where `numbered`, (M,), the expert of each row
    rows: fx.Node | None = None  # (M,), which rows of x they are; None: those of x itself
    order: fx.Node | None = (
        None  # (M,), the permutation that sorts `each` choices of every row of x; rows is order // each
    )
    each: int = 1
    numbered: bool = False


@dataclass(frozen=True)
class Gradients:
    """The products of one layer's backward, in a graph that has both."""

    dy: fx.Node  # (M, N), or (N, M) where `dy_transposed`
    dy_transposed: bool
    dgrad: fx.Node | None  # (M, K); None where x wants no gradient
    wgrad: fx.Node | None  # (N, K), or (K, N) where `wgrad_transposed`; None where the weight wants none
    wgrad_transposed: bool = False

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.dgrad, self.wgrad) if node is not None]


@dataclass(frozen=True)
class Gather:
    """How a weight is gathered from its shards in front of the layer: Note [Graph FSDP] in ops/sharded_weight.py."""

    shard: fx.Node  # a DTensor, of the ranks' rows
    dtype: torch.dtype  # in which it is gathered
    backward_dtype: torch.dtype  # in which its gradient is reduced
    nodes: tuple[fx.Node, ...]  # what gathers it, the last first
    refusal: Refusal | None = None  # why no bytes of its cast can be gathered instead


@dataclass(frozen=True)
class Match:
    """One linear layer: ``y = x wᵀ + bias``, where `weight` holds w as (N, K), or as (K, N) where `transposed`; or one
    an expert, where `weight` holds E of them."""

    node: fx.Node
    x: fx.Node  # (..., K)
    weight: fx.Node
    bias: fx.Node | None = None
    transposed: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    groups: Groups | None = None  # of experts
    adder: fx.Node | None = None  # of experts: what adds the bias to the product, where that is a node of its own
    literal: "Match | None" = (
        None  # the layer of what the product itself reads, where this one reads what that was made of
    )
    parallel: Parallel | None = None  # how DTensors of it are sharded; x is then in front of `before`
    unparallel: Refusal | None = None  # why a layer whose weight is a DTensor is none of those
    before: tuple[fx.Node, ...] = ()  # what stood between x and the layer, which does it itself, the last first
    gather: Gather | None = None  # of its weight
    arrives: ExchangeNodes | None = None  # of experts: the exchange of ranks that x is in front of, as of `before`
    leaves: ExchangeNodes | None = None  # that of its output, which is `behind`
    sizes_of: tuple[fx.Node, ...] = ()  # what asks for sizes of the rows that came
    behind: tuple[fx.Node, ...] = ()  # the redistribution of its output, and what makes that a plain tensor
    gradients: Gradients | None = None  # its backward, where the graph has that too

    @property
    def end(self) -> fx.Node:
        """The last of the nodes whose place the layer takes."""
        return self.behind[-1] if self.behind else self.node

    @property
    def sizes(self) -> tuple[Any, int, int]:
        """(M, N, K), M of all experts together; of what one rank multiplies."""
        rows, weight = value(self.node if self.groups else self.x), value(self.weight)
        n, k = (weight.shape[-1], weight.shape[-2]) if self.transposed else (weight.shape[-2], weight.shape[-1])
        if self.groups and self.groups.numbered:
            return rows.numel() // n, n, k
        m: Any = 1
        for size in rows.shape[:-1]:
            m = m * size
        return (m, n, k) if self.parallel is None else self.parallel.sizes(m, n, k)

    @property
    def experts(self) -> int:
        """How many matrices the weight is."""
        return value(self.weight).shape[0] if self.groups else 1

    @property
    def turned(self) -> bool:
        """Whether the weight lies in memory as (K, N), as its gradient then does."""
        weight = value(self.weight)
        return weight.is_contiguous() if self.transposed else is_turned(weight)

    def gemms(self, rows: int | None = None, turned: bool = False) -> Iterator[tuple[str, tuple[Any, int, int]]]:
        """Which GEMMs autograd will ask for, with their M, N, K; `rows` of the weight, where other layers' are added;
        wgrad's is that of the transposed gradient where it is `turned`."""
        m, n, k = self.sizes
        n = rows or n
        yield "fprop", (m, n, k)
        if self.gradients is not None:
            dgrad, wgrad = self.gradients.dgrad is not None, self.gradients.wgrad is not None
        else:
            learns = value(self.node).requires_grad
            dgrad, wgrad = (learns and value(node).requires_grad for node in (self.x, self.weight))
        if dgrad:
            yield "dgrad", (m, k, n)
        if wgrad:
            yield "wgrad", (k, n, m) if turned else (n, k, m)


# Inserts `te_inductor.linears` of the matches' x and their weights (N, K) at the graph's insertion point; a node a
# match.
Emit = Callable[[Sequence[Match], fx.Node, Sequence[fx.Node]], list[fx.Node]]


class Rule:
    """One form of a linear layer. Subclasses say how to recognise it, and may add to the check and the rewrite."""

    pattern: ClassVar[str]
    joins: ClassVar[bool] = False  # may be one GEMM with others of the same input (merging.py)

    def match(self, node: fx.Node) -> Match | None:
        raise NotImplementedError

    def check(self, match: Match) -> Refusal | None:
        if match.unparallel is not None:
            return match.unparallel
        held = value if match.parallel is None else lambda node: compat.shard_of(value(node))
        x, weight = held(match.x), held(match.weight)
        bias = None if match.bias is None else held(match.bias)
        return (
            requirements.tensors(x, weight)
            or requirements.sizes(*match.sizes)
            or requirements.bias(bias, match.sizes[1], match.experts if match.groups else None)
        )

    def check_slots(self, match: Match, slots: Slots) -> Refusal | None:
        """What a recipe asks for beyond that."""
        return requirements.blocks(slots, value(match.weight), *match.sizes[1:])

    def emulated(self, match: Match, slots: Slots, leaves: bool) -> Refusal | None:
        """Why its GEMMs multiply in high precision what low precision holds, in a program that `leaves` the process or
        one that does not; None where they do not."""
        return requirements.emulated(slots, value(match.weight).device)

    def rewrite(self, match: Match, emit: Emit) -> None:
        graph = match.node.graph
        with graph.inserting_before(match.node):
            weight = (
                graph.call_function(torch.ops.aten.t.default, (match.weight,)) if match.transposed else match.weight
            )
            [new] = emit([match], match.x, [weight])
            replace_layer(match, new)


def call_linears(
    matches: Sequence[Match], x: fx.Node, weights: Sequence[fx.Node], slots: Slots, **more: Any
) -> list[fx.Node]:
    """Insert `te_inductor.linears`, `more` being arguments of it; its output dtype is the node's own, which honours
    torch.autocast."""
    biases = [match.bias for match in matches if match.bias is not None]
    dtype, groups = value(matches[0].node).dtype, matches[0].groups
    # fx has no name for a constant among arguments.
    operands: Any = (x, list(weights), biases, slots, dtype)
    if matches[0].parallel is not None:
        operands = (*operands, matches[0].parallel)
        ys = x.graph.call_function(ops.parallel_linears, operands, more)
    elif groups is None:
        ys = x.graph.call_function(ops.linears, operands, more)
    else:
        operands = (x, list(weights), biases, groups.ends, slots, dtype)
        if groups.order is not None:
            more["rows"] = groups.rows
            more["places"] = x.graph.call_function(ops.places_of, (groups.order, groups.each))
        more |= _exchanges(matches[0])
        ys = x.graph.call_function(ops.grouped_linears, operands, more)
    return [x.graph.call_function(operator.getitem, (ys, place)) for place in range(len(weights))]


def _exchanges(match: Match) -> dict[str, Any]:
    """Arguments of `te_inductor.grouped_linears`."""
    found: dict[str, Any] = {}
    for prefix, exchange in (("", match.arrives), ("y_", match.leaves)):
        if exchange is not None:
            found["group"] = exchange.group
            found[f"{prefix}sent"], found[f"{prefix}received"] = list(exchange.sent), list(exchange.received)
            found[f"{prefix}order"] = exchange.order
    return found


def replace(node: fx.Node, new: fx.Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def replace_layer(match: Match, new: fx.Node) -> None:
    """Put a node in the place of a layer's, with what stands around it."""
    replace(match.end, new)
    for node in (*reversed(match.behind[:-1]), *([match.node] if match.behind else [])):
        node.graph.erase_node(node)
    for node in match.before:  # which other layers may read too
        if not node._erased and not node.users:
            node.graph.erase_node(node)
