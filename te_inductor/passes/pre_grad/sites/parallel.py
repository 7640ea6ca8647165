"""Layers whose weight the graph itself gathers from its shards, Note [Graph FSDP] in ops/sharded_weight.py, or is a
DTensor, with the redistributions that tensor parallelism puts around them: what each tensor is to each rank, as the
placements of Dynamo's fake tensors say. Note [Tensor-parallel layers] in distributed/parallel.py."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import Parallel, is_shard
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import Writes, last_read
from te_inductor.passes.pre_grad.sites.part import Gather, TensorParallel
from te_inductor.passes.pre_grad.sites.rule import Match

_CASTS = ("forward_dtype", "backward_dtype")  # what a redistribution may be asked to send


def with_redistributions(match: Match, writes: Writes) -> Match:
    """The layer as it is where its weight is no DTensor; else with its place among the ranks, or why it has none.
    What the graph writes in between is not moved."""
    if compat.mesh_of_dtensor(value(match.weight)) is None:
        return match
    why_not = _kinds(match) or _products(match)
    uneven = None if why_not is not None else _uneven(match)
    if why_not is not None or (uneven is not None and not _all_have_words(match)):
        return match.having(TensorParallel(refusal=why_not or uneven))
    mesh: Any = compat.mesh_of_dtensor(value(match.weight))
    weight, x, gather = _dim(value(match.weight)), match.x, None
    if weight == 0 and _is_gather(x) and not writes.between([x, x.all_input_nodes[0]], x, last_read(match.node)):
        x, gather = x.all_input_nodes[0], x
    made = _made_first(x, last_read(match.node), writes)
    behind, y, local = _behind(match.node)
    reduces = weight == 1 and y is not None
    if not reduces and y is not None and value(y).placements != value(match.node).placements:  # type: ignore[attr-defined]
        behind, local = (), False
    if weight == 1 and match.bias is not None and not reduces:
        return match.having(TensorParallel(refusal=Refusal("a bias is added to partial sums of the ranks")))
    parallel = Parallel(
        mesh.get_group().group_name,
        mesh.size(),
        weight,
        _dim(value(x)),
        gather is not None,
        reduces,
        _dim(value(y)) if reduces and y is not None else None,
        local,
    )
    before = tuple(node for node in (gather, x if made is not x else None) if node is not None)
    return match.having(TensorParallel(parallel, uneven), x=made, before=before, behind=behind)


def _made_first(x: fx.Node, until: fx.Node | None, writes: Writes) -> fx.Node:
    """The first DTensor that is made of the same tensor in the same way, so that layers are seen to read one input: each
    style makes one for its own layer."""
    call = compat.method_call(x)
    if call is None or call[0] != "from_local":
        return x
    source = x.args[0]
    alike = (
        node
        for node in x.all_input_nodes[0].users
        if node.graph is x.graph and node.args[:1] == (source,) and compat.method_call(node) == call
    )
    first = min(alike, default=x)
    return x if writes.between([first, x], first, until) else first


def _products(match: Match) -> Refusal | None:
    """Refuses where torch itself would redistribute an operand."""
    x, weight = value(match.x), value(match.weight)
    at, last = _dim(x), x.dim() - 1
    expected: list[int | None] = {0: [None], 1: [last], None: [None, *range(last)]}[_dim(weight)]  # type: ignore[assignment]
    if at not in expected:
        return Refusal(
            "weight is %s and input %s: torch redistributes one inside of the layer", _text(weight), _text(x)
        )
    return None


def _uneven(match: Match) -> Refusal | None:
    """Refuses where some rank would have more than another."""
    weight = value(match.weight)
    for what, node in (("input", match.x), ("weight", match.weight)):
        if not _is_even(node):
            shape = tuple(value(node).shape)
            return Refusal(
                "%s of shape %s is sharded unevenly over %d ranks", what, shape, compat.mesh_of_dtensor(weight).size()
            )
    return None


def _all_have_words(match: Match) -> bool:
    """Whether each rank has rows of the weight, though not as many as another."""
    weight = value(match.weight)
    ranks = compat.mesh_of_dtensor(weight).size()
    return _dim(weight) == 0 and weight.shape[0] > (ranks - 1) * -(-weight.shape[0] // ranks)


def _kinds(match: Match) -> Refusal | None:
    """What a tensor of the layer is that no tensor-parallel layer has."""
    tensors: dict[str, Any] = {"weight": value(match.weight), "input": value(match.x)}
    if match.bias is not None:
        tensors["bias"] = value(match.bias)
    if match.transposed or match.dims > 2:
        return Refusal("a product with a DTensor that is no linear layer")
    mesh = tensors["weight"].device_mesh
    for what, tensor in tensors.items():
        if compat.mesh_of_dtensor(tensor) is None:
            return Refusal("weight is a DTensor, %s a %s", what, type(tensor).__name__)
        if tensor.device_mesh != mesh:
            return Refusal("weight and %s are DTensors of different meshes", what)
        if len(tensor.placements) != 1:
            return Refusal("%s is a DTensor over a mesh of %d dimensions, not one", what, len(tensor.placements))
        [placement] = tensor.placements
        if placement.is_partial():
            return Refusal("%s is a DTensor of partial sums, which no cast may round", what)
        if not (placement.is_replicate() or is_shard(placement)):
            return Refusal("%s is a DTensor placed as %s", what, placement)
    bias = tensors.get("bias")
    if bias is not None and _dim(bias) != (0 if _dim(tensors["weight"]) == 0 else None):
        return Refusal("weight is %s and bias %s", _text(tensors["weight"]), _text(bias))
    return None


def _is_gather(node: fx.Node) -> bool:
    """Whether a node makes a whole tensor of rows that the ranks have."""
    if not _redistributes(node):
        return False
    source: Any = value(node.all_input_nodes[0])
    if compat.mesh_of_dtensor(source) is None or len(source.placements) != 1:
        return False
    made: Any = value(node)
    dim = _dim(source) if is_shard(source.placements[0]) else None
    even = _is_even(node.all_input_nodes[0])
    return bool(made.placements[0].is_replicate() and dim not in (None, source.dim() - 1) and even)


def _redistributes(node: fx.Node) -> bool:
    """Whether it is a redistribution that sends what it is given, in both directions."""
    call = compat.method_call(node)
    if call is None or call[0] != "redistribute":
        return False
    source: Any = node.all_input_nodes[0]
    return value(source).dtype == value(node).dtype and not any(call[2].get(option) for option in _CASTS)


def _behind(node: fx.Node) -> tuple[tuple[fx.Node, ...], fx.Node | None, bool]:
    """The redistribution that alone reads a node, and what alone takes a plain tensor of that; the DTensor that is left
    of the node; whether what reads it takes a plain tensor."""
    nodes: list[fx.Node] = []
    y: fx.Node | None = None
    user = _only_user(node)
    if user is not None and _redistributes(user) and _may_be_scattered(user):
        nodes, y = [user], user
        user = _only_user(user)
    call = None if user is None else compat.method_call(user)
    if user is not None and call is not None and call[0] == "to_local" and not call[1] and not any(call[2].values()):
        return (*nodes, user), y or node, True
    return tuple(nodes), y, False


def _may_be_scattered(node: fx.Node) -> bool:
    """Whether a redistribution leaves a tensor whole, or shards its rows evenly."""
    y: Any = value(node)
    if len(y.placements) != 1 or not (y.placements[0].is_replicate() or is_shard(y.placements[0])):
        return False
    return _is_even(node) and (_dim(y) != y.dim() - 1 or y.placements == value(node.all_input_nodes[0]).placements)  # type: ignore[attr-defined]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 and is_tensor(next(iter(node.users))) else None


def _dim(tensor: Any) -> int | None:
    """The dimension along which a DTensor is sharded."""
    [placement] = tensor.placements
    return placement.dim % tensor.dim() if is_shard(placement) else None


def _is_even(node: fx.Node) -> bool:
    tensor: Any = value(node)
    dim = _dim(tensor)
    return dim is None or statically_known_true(tensor.shape[dim] % tensor.device_mesh.size() == 0)


def _text(tensor: torch.Tensor) -> str:
    return ", ".join(map(str, tensor.placements))  # type: ignore[attr-defined]


SHARED = Refusal("something else reads it too, in high precision")


def with_gather(match: Match) -> Match:
    """The layer with what gathers its weight, if anything does: ``shard.redistribute(…).to_local(…)``."""
    local = match.weight
    if compat.mesh_of_dtensor(value(local)) is not None or not _calls(local, "to_local"):
        return match
    whole = local.args[0]
    if not (isinstance(whole, fx.Node) and is_tensor(whole) and _calls(whole, "redistribute")):
        return match
    shard = whole.args[0]
    if not (isinstance(shard, fx.Node) and is_tensor(shard) and isinstance(value(shard), torch.nn.Parameter)):
        return match
    found: Any = value(shard)
    if not any(placement.is_shard() for placement in found.placements):
        return match  # nothing is gathered
    _, _, options = compat.method_call(whole) or ("", (), {})
    reduced = options.get("backward_dtype") or found.dtype
    gather = Gather(shard, value(local).dtype, reduced, (local, whole))
    return match.having(replace(gather, refusal=_refusal(match, gather)))


def _calls(node: fx.Node, method: str) -> bool:
    call = compat.method_call(node)
    return call is not None and call[0] == method


def _refusal(match: Match, gather: Gather) -> Refusal | None:
    shard: Any = value(gather.shard)
    local, whole = gather.nodes
    sharded = [placement for placement in shard.placements if not placement.is_replicate()]
    if match.transposed or match.dims > 2:
        return Refusal("it is not that of a linear layer")
    if len(sharded) != 1 or not is_shard(sharded[0]) or sharded[0].dim != 0:
        return Refusal("its shards are placed as %s, expected rows along one dimension of a mesh", shard.placements)
    ranks = shard.device_mesh.size(shard.placements.index(sharded[0]))
    if not statically_known_true(shard.shape[0] % ranks == 0):
        return Refusal("its %s rows are sharded unevenly over %d ranks", shard.shape[0], ranks)
    made: Any = value(whole)
    if not all(placement.is_replicate() for placement in made.placements):
        return Refusal("what is gathered of it is placed as %s", made.placements)
    _, args, options = compat.method_call(local) or ("", (), {})
    placements = options.get("grad_placements") or ()
    sums = all(placement.is_partial() and placement.reduce_op == "sum" for placement in placements)
    if args or len(placements) != len(shard.placements) or not sums:
        return Refusal("its gradient is placed as %s, expected partial sums", placements or None)
    if len(whole.users) > 1 or len(local.users) > 1:
        return SHARED
    return None
