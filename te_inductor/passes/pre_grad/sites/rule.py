"""A rule finds one form of a linear layer in a Dynamo graph: match -> check -> rewrite, without state.

`match` recognises, `check` decides (a `Refusal` is a value that says why not), `rewrite` replaces one node by
`te_inductor.layers`. A rewrite inserts OpOverload nodes only: other targets would bypass AOTAutograd's cache.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import fx

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import Parallel
from te_inductor.kernels.problem import Program
from te_inductor.ops.layers.parts import is_turned
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.passes.pre_grad.sites.exchanges import ExchangeNodes, Exchanges
from te_inductor.passes.pre_grad.sites.groups import Groups
from te_inductor.passes.pre_grad.sites.part import Backward, Gather, Gradients, SitePart, TensorParallel
from te_inductor.recipes import Slots

P = TypeVar("P", bound=SitePart)


@dataclass(frozen=True)
class Match:
    """One linear layer: ``y = x wᵀ + bias``, where `weight` holds w as (N, K), or as (K, N) where `transposed`; or one
    an expert, where `weight` holds E of them. What else there is to it is in its parts."""

    node: fx.Node
    x: fx.Node  # (..., K)
    weight: fx.Node
    bias: fx.Node | None = None
    transposed: bool = False
    before: tuple[fx.Node, ...] = ()  # what stood between x and the layer, which does it itself, the last first
    behind: tuple[fx.Node, ...] = ()  # the same behind its output: a redistribution, what makes that a plain tensor
    parts: tuple[SitePart, ...] = ()

    def part(self, kind: type[P]) -> P | None:
        """The one of a kind."""
        return next((one for one in self.parts if isinstance(one, kind)), None)

    def first_refusal(self, ask: Callable[[SitePart], Refusal | None]) -> Refusal | None:
        """What the first of its parts says that refuses something."""
        return next(filter(None, map(ask, self.parts)), None)

    def having(self, part: SitePart, **changes: Any) -> "Match":
        """The layer with a part, in the place of another one of its kind, and with other fields."""
        kept = tuple(one for one in self.parts if not isinstance(one, type(part)))
        return dataclasses.replace(self, parts=(*kept, part), **changes)

    @property
    def groups(self) -> Groups | None:
        """The groups of experts."""
        return self.part(Groups)

    @property
    def parallel(self) -> Parallel | None:
        """How DTensors of it are sharded; x is then in front of `before`."""
        found = self.part(TensorParallel)
        return None if found is None else found.parallel

    @property
    def gather(self) -> Gather | None:
        """The gather of its weight."""
        return self.part(Gather)

    @property
    def arrives(self) -> ExchangeNodes | None:
        """The exchange between ranks that x is in front of, as of `before`."""
        found = self.part(Exchanges)
        return None if found is None else found.arrives

    @property
    def leaves(self) -> ExchangeNodes | None:
        """The exchange of its output, which is `behind`."""
        found = self.part(Exchanges)
        return None if found is None else found.leaves

    @property
    def gradients(self) -> Gradients | None:
        """Its backward, where the graph has that too."""
        found = self.part(Backward)
        return None if found is None else found.gradients

    @property
    def knows_gradient(self) -> bool:
        """Whether the scale of its result's gradient is known beforehand."""
        return any(part.knows_gradient for part in self.parts)

    @property
    def between_ranks(self) -> bool:
        """Whether the layer exchanges tensors with other ranks, so that these need as many rows."""
        return any(part.between_ranks for part in self.parts)

    @property
    def end(self) -> fx.Node:
        """The last of the nodes whose place the layer takes."""
        return self.behind[-1] if self.behind else self.node

    @property
    def dims(self) -> int:
        """How many dimensions the weight has: three of experts."""
        return 2 + sum(part.dims for part in self.parts)

    @property
    def sizes(self) -> tuple[Any, int, int]:
        """(M, N, K), of what one rank multiplies."""
        x, weight = value(self.x), value(self.weight)
        n, k = (weight.shape[-1], weight.shape[-2]) if self.transposed else (weight.shape[-2], weight.shape[-1])
        m: Any = 1
        for size in x.shape[:-1]:
            m = m * size
        for part in self.parts:
            m, n, k = part.sizes(self, m, n, k)
        return m, n, k

    @property
    def experts(self) -> int:
        """How many matrices the weight is."""
        return value(self.weight).shape[0] if self.dims > 2 else 1

    @property
    def turned(self) -> bool:
        """Whether the weight lies in memory as (K, N), as its gradient then does."""
        weight = value(self.weight)
        return weight.is_contiguous() if self.transposed else is_turned(weight)

    def gemms(self, rows: int | None = None, turned: bool = False) -> Iterator[tuple[str, tuple[Any, int, int]]]:
        """Yields the GEMMs that autograd will ask for, with their M, N, K; `rows` of the weight, where other layers' are
        added; wgrad's is that of the transposed gradient where it is `turned`."""
        m, n, k = self.sizes
        n = rows or n
        yield "fprop", (m, n, k)
        gradients = self.gradients
        if gradients is not None:
            dgrad, wgrad = gradients.dgrad is not None, gradients.wgrad is not None
        else:
            learns = value(self.node).requires_grad
            dgrad, wgrad = (learns and value(node).requires_grad for node in (self.x, self.weight))
        if dgrad:
            yield "dgrad", (m, k, n)
        if wgrad:
            yield "wgrad", (k, n, m) if turned else (n, k, m)

    def operand(self) -> fx.Node:
        """What the layer is given for x, at the graph's insertion point."""
        x = self.x
        for part in self.parts:
            x = part.operand(self, x)
        return x

    def matrices(self) -> fx.Node:
        """Its weight as (N, K), or (E, N, K), at the graph's insertion point."""
        if not self.transposed:
            return self.weight
        if self.dims == 2:
            return self.node.graph.call_function(torch.ops.aten.t.default, (self.weight,))
        return self.node.graph.call_function(torch.ops.aten.transpose.int, (self.weight, 1, 2))


# Inserts `te_inductor.layers` of the matches' x and their weights (N, K) at the graph's insertion point; a node a
# match.
Emit = Callable[[Sequence[Match], fx.Node, Sequence[fx.Node]], list[fx.Node]]


class Rule:
    """One form of a linear layer. Subclasses say how to recognise it, and may add to the check and the rewrite."""

    pattern: ClassVar[str]
    joins: ClassVar[bool] = False  # may be one GEMM with others of the same input (merging.py)

    def match(self, node: fx.Node) -> Match | None:
        raise NotImplementedError

    def check(self, match: Match) -> Refusal | None:
        refusal = match.first_refusal(lambda part: part.refuse(match)) or self.check_form(match)
        if refusal is not None:
            return refusal
        held = value if match.parallel is None else lambda node: compat.shard_of(value(node))
        x, weight = held(match.x), held(match.weight)
        bias = None if match.bias is None else value(match.bias)
        n = match.sizes[1] if match.parallel is None else value(match.weight).shape[0]
        return (
            requirements.tensors(x, weight)
            or requirements.sizes(*match.sizes[1:])
            or requirements.bias(bias, n, match.experts if match.dims > 2 else None)
        )

    def check_form(self, match: Match) -> Refusal | None:
        """What its form asks for beyond that."""
        return None

    def check_slots(self, match: Match, slots: Slots) -> Refusal | None:
        """What a recipe asks for beyond that."""
        return requirements.blocks(slots, value(match.weight), *match.sizes[1:])

    def emulated(self, match: Match, slots: Slots, program: Program) -> Refusal | None:
        """Why its GEMMs multiply in high precision what low precision holds, as part of a program; None where they do
        not."""
        return requirements.emulated(slots, value(match.weight).device)

    def rewrite(self, match: Match, emit: Emit) -> None:
        with match.node.graph.inserting_before(match.node):
            [new] = emit([match], match.operand(), [match.matrices()])
            replace_layer(match, new)


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
