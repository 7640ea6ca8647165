"""What a forward saves for its backward, and which of it may be saved in E4M3.

A value may where nothing but the backward's arithmetic on single elements reads it, of a kind that carries a relative
error on as one of the same size: products, and functions such as SiLU and GELU (`saved_functions`). Its error is half a
step of E4M3, or of the block's scale where it is much smaller than the block's largest. Masks are saved as bits, and so
is what the backward compares with a value that is cast (`saved_masks`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import origins
from te_inductor.passes.graph.node_kinds import (
    in_memory_order,
    is_as_large,
    is_pointwise,
    is_view,
    is_view_or_cast,
    tensor_of,
)
from te_inductor.passes.graph.values import bytes_of
from te_inductor.passes.graph.walks import back_past, reached
from te_inductor.passes.joint.saved_checkpoints import Recomputation, is_computed_again
from te_inductor.passes.joint.saved_functions import SUMS, WIDE, functions_of, name_of
from te_inductor.passes.joint.saved_masks import is_known, is_mask, new_in_forward, refuse_mask
from te_inductor.recipes import Quantizer

aten = torch.ops.aten
QUANTIZER = Quantizer("e4m3", power_2_scale=True, scope="1x128")
SMALLEST = 4096  # values of a mask that is saved as bits
MOST = 0.75  # bytes with scales, of what the value takes: less of a gain is not worth an error


@dataclass(frozen=True)
class Saved:
    """One value that a forward saves for its backward, or a part of one."""

    node: fx.Node  # an output of the forward
    read: (
        fx.Node
    )  # what is cast in its place: of the backward, the input of the same name, or what alone is computed of it
    source: fx.Node  # and of the forward, or what the forward would compute it of
    refusal: Refusal | None = None  # why it is saved as it is
    masks: tuple[fx.Node, ...] = ()  # comparisons of the backward that are saved beside it

    @property
    def value(self) -> torch.Tensor:
        return self.read.meta["val"]  # type: ignore[no-any-return]

    @property
    def is_mask(self) -> bool:
        return self.value.dtype is torch.bool

    @property
    def order(self) -> list[int]:
        """Its dimensions as they lie in memory, the last one with neighbours side by side."""
        return in_memory_order(self.value) or list(range(self.value.dim()))

    @property
    def bytes_before(self) -> int:
        return bytes_of(self.value) // self.value.itemsize * self.node.meta["val"].itemsize

    @property
    def bytes_after(self) -> int:
        return self.bytes_before if self.refusal is not None else _bytes_cast(self.value, self.masks)


def decide(
    forward: fx.Graph, backward: fx.Graph, results: int, refuse: Callable[[fx.Node], Refusal | None]
) -> list[Saved]:
    """The values that a forward saves behind its `results` first outputs, masks and what is in floating point and wider
    than a byte; `refuse` says what the options say of a node of the forward. Inputs are in memory anyway."""
    outputs = _outputs(forward)
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    later = set(reached([node for name, node in inputs.items() if "tangent" in name], lambda node: node.users))
    known = {node.name: node for node in forward.nodes}
    held = _memory(outputs[:results])
    saved = (node for node in outputs[results:] if isinstance(node, fx.Node) and node.op != "placeholder")
    nodes = [node for node in saved if _can_be_narrower(node) and node.name in inputs]
    cast: set[fx.Node] = set()  # what the backward need not compute
    reading = _BackwardReads(known, later, cast, refuse)
    chains = {node: reading.chain(inputs[node.name]) for node in nodes}
    found: dict[fx.Node, list[Saved]] = {}
    for node in sorted(nodes, key=lambda node: len(chains[node]) == 1):
        found[node] = reading.parts(node, chains[node], backward, held)
        cast |= {one.read for one in found[node] if one.refusal is None}
    return list(_together([one for node in nodes for one in found[node]]))


def _outputs(graph: fx.Graph) -> list[Any]:
    [output] = graph.find_nodes(op="output")
    return list(output.args[0])  # type: ignore[arg-type]


def _can_be_narrower(node: fx.Node) -> bool:
    value = tensor_of(node)
    wide = value is not None and value.dtype in (*WIDE, torch.bool) and value.dim() > 0
    return wide and node.target is not ops.read_scales


def _memory(nodes: Sequence[Any]) -> set[Any]:
    return {place for node in nodes if isinstance(node, fx.Node) for place in origins(node)}


def _held(node: fx.Node, held: set[Any]) -> Refusal | None:
    if back_past(node, is_view).op in ("placeholder", "get_attr"):
        return Refusal("it is a view of an input of the graph, which its caller holds")
    if origins(node) & held:
        return Refusal("the graph returns it, or a tensor in the same memory")
    return None


def _of_sizes(read: fx.Node, backward: fx.Graph) -> Refusal | None:
    value = tensor_of(read)
    assert value is not None
    if not isinstance(value.shape[-1], int) or in_memory_order(value) is None:
        return Refusal("the size of its last dimension, or its order in memory, is not known before it runs")
    unknown = [size for size in value.shape if not isinstance(size, int) and size_node(size, backward) is None]
    if len(unknown) > 1:
        return Refusal("several of its sizes are not known before it runs")
    return _too_long(read) if _bytes_cast(value) > MOST * bytes_of(value) else None


def _too_long(read: fx.Node) -> Refusal:
    value = read.meta["val"]
    last = value.shape[in_memory_order(value)[-1]]  # type: ignore[index]
    return Refusal("rows of %s values take as many bytes with a scale for each 128 of them", last)


def size_node(size: Any, graph: fx.Graph) -> fx.Node | None:
    """The input of a graph that is a symbolic size."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    return None


def _bytes_cast(value: torch.Tensor, masks: Sequence[fx.Node] = ()) -> int:
    """What codes and scales take, or bits, and masks beside them."""
    bits = sum(bytes_of(one.meta["val"]) for one in masks) // 8
    if value.dtype is torch.bool:
        return bytes_of(value) // 8
    order = in_memory_order(value)
    columns = value.shape[-1] if order is None else value.shape[order[-1]]
    rows = bytes_of(value) // value.itemsize // max(columns, 1)
    data = rows * QUANTIZER.stored(columns)
    return data + 4 * data // QUANTIZER.granularity.block[1] + bits


def _of_origin(node: fx.Node) -> Refusal | None:
    """Softmax relies on its rows adding up to one."""
    node = back_past(node, is_view_or_cast)
    if node.target in (aten._softmax.default, aten._log_softmax.default):
        return Refusal("it is a softmax, whose gradient relies on sums of one")
    if node.target is aten.div.Tensor and isinstance(node.args[1], fx.Node):
        below = reached([node.args[1]], lambda one: one.all_input_nodes if is_view_or_cast(one) else ())
        if any(one.target is aten.sum.dim_IntList and node.args[0] in one.all_input_nodes for one in below):
            return Refusal("it is a softmax, whose gradient relies on sums of one")
    return None


@dataclass(frozen=True)
class _BackwardReads:
    """How a backward reads what a forward saves; `later` is what it computes of gradients, `known` the forward."""

    known: dict[str, fx.Node]
    later: set[fx.Node]
    cast: set[fx.Node]
    refuse: Callable[[fx.Node], Refusal | None]

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """A chain of functions of single elements, each of which alone reads the one before, that the forward computes
        too, or could as a sum: the last is saved in the place of the first. Masks are apart, and casts and views at its
        end are left to the backward."""
        chain = [node]
        while len(readers := self._readers(chain[-1])) == 1:
            [user] = readers
            others = [one for one in user.all_input_nodes if one is not chain[-1]]
            computed = user not in self.later and (is_pointwise(user) or is_view(user))
            known = all(is_known(one, self.known) for one in (user, *others))
            known = known or (user.target in SUMS and new_in_forward(user, self.known) is not None)
            if not computed or not known or not is_as_large(user, node):
                break
            chain.append(user)
        while len(chain) > 1 and is_view_or_cast(chain[-1]):
            narrower = tensor_of(chain[-1]).itemsize < tensor_of(chain[-2]).itemsize  # type: ignore[union-attr]
            if narrower and not all(is_view_or_cast(one) for one in chain[1:]):
                break
            chain.pop()
        return chain

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if not is_mask(user, self.later)]

    def _parts(self, chain: list[fx.Node]) -> list[list[fx.Node]]:
        """The chains behind parts of a value, which have no element twice; none where anything else reads the value."""
        readers = self._readers(chain[-1])
        lists = [one for one in readers if tensor_of(one) is None and is_view(one)]
        views = [one for one in readers if one not in lists] + [user for one in lists for user in one.users]
        sizes = [one.numel() for one in map(tensor_of, views) if one is not None]
        if not all(is_view(one) and is_known(one, self.known) and one not in self.later for one in views):
            return []
        whole = tensor_of(chain[-1])
        if len(sizes) < len(views) or whole is None or not statically_known_true(sum(sizes) <= whole.numel()):
            return []
        return [[*chain, *lists, *self.chain(one)] for one in views]

    def parts(self, node: fx.Node, chain: list[fx.Node], backward: fx.Graph, held: set[Any]) -> list[Saved]:
        """The parts of what is saved that are cast, or all of it with the reason why it is not."""
        found = self._part(node, chain, backward, held)
        if found.refusal is None or found.is_mask:
            return [found]
        for ways in (self._parts(chain), [chain[:1]]):
            parts = [self._part(node, one, backward, held) for one in ways]
            if parts and all(one.refusal is None for one in parts):
                return parts
        return [found]

    def _part(self, node: fx.Node, chain: list[fx.Node], backward: fx.Graph, held: set[Any]) -> Saved:
        read, source = chain[-1], next(self.known[one.name] for one in chain[::-1] if is_known(one, self.known))
        refusal = self.refuse(source) or _held(node, held)
        if source.meta["val"].dtype is torch.bool:
            return Saved(node, read, source, refusal or self._of_mask(read))
        refusal = refusal or _of_sizes(read, backward) or _of_origin(node)
        masks = refusal or self._of_readers(chain, source)
        if isinstance(masks, Refusal):
            return Saved(node, read, source, masks)
        found = Saved(node, read, source, None, tuple(masks))
        return found if found.bytes_after <= MOST * found.bytes_before else replace(found, refusal=_too_long(read))

    def _of_mask(self, mask: fx.Node) -> Refusal | None:
        whole = [user for user in mask.users if not (is_pointwise(user) or is_view(user))]
        if whole:
            return Refusal("%s of the backward reads it", name_of(whole[0]))
        if bytes_of(mask.meta["val"]) < SMALLEST:
            return Refusal("fewer than %d values are not worth a kernel that packs them", SMALLEST)
        return refuse_mask(mask, self.known)

    def _of_readers(self, chain: list[fx.Node], source: fx.Node) -> Refusal | list[fx.Node]:
        """Why what reads a value does not bear its error, if a checkpoint does not compute it again; else comparisons."""
        found = functions_of(chain, self.known, self.later, self.cast, None)
        if not isinstance(found, Refusal) or not any(map(is_computed_again, chain[-1].users)):
            return found
        again = Recomputation(chain[-1], source, self.later)
        return functions_of(chain, self.known, self.later, self.cast, again)


def _together(found: Sequence[Saved]) -> Iterator[Saved]:
    """Memory is let go of where all that is saved of it is cast."""
    refused = _memory([one.node for one in found if one.refusal is not None])
    for one in found:
        partly = one.refusal is None and origins(one.node) & refused
        yield replace(one, refusal=Refusal("another part of its memory is saved as it is")) if partly else one
