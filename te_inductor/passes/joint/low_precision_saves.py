"""The pass that has a forward save values in E4M3, with a scale for each 128 neighbours: what `saved_values` lets it.

It runs on the two graphs that the partitioner has made of a joint one. There what is saved is known, and the backward's
uses are apart from the forward's, which stay exact. The cast stands behind what makes the value, so that Inductor writes
codes in the same kernel; the backward's readers compute the value of codes and scales where they read it."""

import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from te_inductor import ops
from te_inductor.config import Options
from te_inductor.diagnostics import Outside, Refusal, announce, log, say
from te_inductor.passes.graph import unkept
from te_inductor.passes.graph.custom_pass import package_hash
from te_inductor.passes.graph.effect import Effect
from te_inductor.passes.graph.module_path import module_path
from te_inductor.passes.graph.node_kinds import IN_MEMORY, is_cast, is_pointwise, is_view_or_cast
from te_inductor.passes.graph.tracing import insert, take_place
from te_inductor.passes.graph.walks import reached
from te_inductor.passes.joint.saved_masks import LANES, compute_in_forward, pack, traced, unpack
from te_inductor.passes.joint.saved_values import QUANTIZER, Saved, decide, size_node
from te_inductor.presentation.paths import names_of
from te_inductor.presentation.report import Report, SavedSite, Unmet
from te_inductor.presentation.saved import text as table_of_saved

aten = torch.ops.aten
# A tensor that is computed of more than so many others is written before several readers read it (4 in Inductor). What
# is saved in low precision is read as two. The gradient of a gate is computed of dy, gate and up: it was written, 235 MB
# of 8192 x 14336, in front of the kernel that casts it.
MOST_READS_WITH_SCALES = 5
LOW = "low_precision"  # the option's value
_PARTITIONER = "custom_partitioner_fn"  # Inductor's name for what makes the two graphs
_NOT_CHECKED = (
    "saved_tensor_with_no_vc_check"  # torch's mark of what autograd keeps without asking whether it was written
)


class SavingPartitioner(CustomPartitionerFn):  # type: ignore[misc]
    """The partitioner, torch's or the user's, whose graphs save as an option says. Part of both compile caches' keys, by
    which it is found again without what it tells.

    `entries` are globs over the modules that read a value, each with a precision, of which the first that matches wins;
    `tell` gets a row a value. `modules` are those of the graph's nodes, which no key has otherwise."""

    def __init__(
        self,
        theirs: Callable[..., Any] | None,
        entries: Sequence[tuple[str, str]],
        tell: Callable[[Sequence[SavedSite]], None] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.theirs, self.entries, self.tell, self.modules = theirs, tuple(entries), tell, tuple(modules)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **given: Any) -> Any:
        partition = self.theirs or min_cut_rematerialization_partition
        _read_casts_themselves(gm.graph)
        modules = partition(gm, joint_inputs, **given)
        found = save(modules[0].graph, modules[1].graph, given["num_fwd_outputs"], self._refuse)
        for module in modules:
            module.recompile()
        rows = [_row(one) for one in found]
        if _casts_nothing(rows):
            unkept.leave_out(modules[0])
        if self.tell is not None:
            self.tell(rows)
        return modules

    def _refuse(self, node: fx.Node) -> Refusal | None:
        names = names_of(_place(node))
        said = (value for glob, value in self.entries if any(fnmatchcase(name, glob) for name in names))
        return None if next(said, None) == LOW else Outside("option 'saved' says so")

    def uuid(self) -> Any:
        """None, which turns the cache off, where the user's partitioner has no identity."""
        theirs = None if self.theirs is None else self.theirs.uuid()  # type: ignore[attr-defined]
        ours = package_hash(), self.entries, self.modules
        return ours if self.theirs is None else theirs and (*ours, theirs)

    def __reduce__(self) -> Any:
        return type(self), (self.theirs, self.entries, None, self.modules)


def _read_casts_themselves(graph: fx.Graph) -> None:
    """Gives arithmetic the casts of which it reads copies, as LayerNorm's backward does in 16 bits. What it then computes
    of one is what the forward computes, and may be saved in the value's place: the difference from the mean."""
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source: Any = node.args[0]
        same = node.meta["val"].stride() == source.meta["val"].stride()
        marked = "recompute" in node.meta  # a checkpoint's decision
        if same and not marked and is_cast(source) and all(map(is_pointwise, node.users)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _casts_nothing(rows: Sequence[SavedSite]) -> bool:
    """Whether all is saved as it is, of which `_finish` tells."""
    return bool(rows) and all(row.reason is not None for row in rows)


def _row(one: Saved) -> SavedSite:
    value = one.value
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    reason = None if one.refusal is None else str(one.refusal)
    dtype = str(value.dtype).removeprefix("torch.")
    return SavedSite(
        _place(one.source),
        module_path(one.source),
        shape,
        dtype,
        one.bytes_before,
        one.bytes_after,
        reason,
        one.refusal is not None and one.refusal.outside,
    )


def _place(node: fx.Node) -> str:
    """The module of the forward that reads a value, or else the one that makes it."""
    readers = reached([node], lambda one: one.users if one is node or is_view_or_cast(one) else ())
    return next(filter(None, map(module_path, [*list(readers)[1:], node])), "")


def save(
    forward: fx.Graph, backward: fx.Graph, results: int, refuse: Callable[[fx.Node], Refusal | None]
) -> list[Saved]:
    """Changes both graphs, and returns what the forward saves besides its `results` first outputs."""
    found = decide(forward, backward, results, refuse)
    known = {node.name: node for node in forward.nodes}
    cast = [one for one in found if one.refusal is None]
    for mask, node in {mask: one.node for one in cast for mask in one.masks}.items():
        _save(forward, backward, Saved(node, mask, mask), known)
    for one in {one.read: one for one in cast}.values():
        _save(forward, backward, one, known)
    for node in {one.node: None for one in cast}:
        _let_go(forward, backward, node)
    if cast:
        for graph in (forward, backward):
            graph.eliminate_dead_code()
            graph.lint()
    return found


def _save(forward: fx.Graph, backward: fx.Graph, one: Saved, known: dict[str, fx.Node]) -> None:
    """Has the forward save two tensors, of which the backward's readers of a value compute it."""
    _read(backward, one, *_write(forward, one, compute_in_forward(one.read, known)))


def _write(forward: fx.Graph, one: Saved, source: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Has the forward return codes and scales behind the value, or two words for each 128 of a mask's."""
    order = one.order
    if _is_summed_again(source):
        source.meta[IN_MEMORY] = True
    with forward.inserting_before(source.next):
        x = source if order == sorted(order) else _call(source, aten.permute.default, source, order)
        x = _call(source, aten.reshape.default, x, [-1, LANES if one.is_mask else one.value.shape[order[-1]]])
        if one.is_mask:
            first, second = traced(source, pack, x)
        else:
            pair = _call(source, ops.quantize, x, QUANTIZER)
            first, second = (_call(source, operator.getitem, pair, which) for which in (0, 1))
    for made in (first, second):
        made.meta.pop(_NOT_CHECKED, None)
        made.meta |= {key: one.node.meta[key] for key in (_NOT_CHECKED,) if key in one.node.meta}
    _change_outputs(forward, one.node, (one.node, first, second))
    return first, second


def _is_summed_again(node: fx.Node) -> bool:
    """Whether a node is a sum that another sum reads, as a residual stream is. What is saved as it is, is in memory; else
    each sum would be computed anew of the terms of all before it, up to `MOST_READS_WITH_SCALES`, kept for that."""
    return node.target is aten.add.Tensor and any(user.target is aten.add.Tensor for user in node.users)


def _read(backward: fx.Graph, one: Saved, *made: fx.Node) -> None:
    """Gives the backward's readers of the value what is saved in its place."""
    [given] = [node for node in backward.find_nodes(op="placeholder") if node.name == one.node.name]
    inputs = []
    with backward.inserting_before(given.next):
        for name, node in zip(("low", "high") if one.is_mask else ("codes", "scales"), made, strict=True):
            inputs.append(
                backward.placeholder(f"{one.read.name}_{name}")
            )  # no node's name: the input would be called so
            inputs[-1].meta = dict(node.meta)
    value, order, users = one.value, one.order, set(one.read.users)
    first = next(node for node in backward.nodes if node in users)
    with backward.inserting_before(first):
        if one.is_mask:
            [x] = traced(first, unpack, *inputs)
        else:
            x = _call(first, ops.dequantize, *inputs, QUANTIZER, value.dtype)
            columns = value.shape[order[-1]]
            if columns != x.meta["val"].shape[1]:
                x = _call(first, aten.slice.Tensor, x, 1, 0, columns)
        sizes = [value.shape[dim] for dim in order]
        given_sizes = [size if isinstance(size, int) else size_node(size, backward) or -1 for size in sizes]
        x = _call(first, aten.reshape.default, x, given_sizes)
        if order != sorted(order):
            x = _call(first, aten.permute.default, x, [order.index(dim) for dim in range(len(order))])
    one.read.replace_all_uses_with(x)


def _let_go(forward: fx.Graph, backward: fx.Graph, node: fx.Node) -> None:
    """Has nothing saved of what the backward does not read any more."""
    backward.eliminate_dead_code()
    [given] = [one for one in backward.find_nodes(op="placeholder") if one.name == node.name]
    backward.erase_node(given)
    _change_outputs(forward, node, ())


def _change_outputs(forward: fx.Graph, node: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Puts others in the place of what is saved, and what is said of it beside each."""
    [output] = forward.find_nodes(op="output")
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    place = len(outputs) - 1 - outputs[::-1].index(node)

    def changed(old: Sequence[Any], new: Sequence[Any]) -> Any:
        return type(old)([*old[:place], *new, *old[place + 1 :]])  # type: ignore[call-arg]

    output.args = (tuple(changed(outputs, nodes)),)
    for about in ("desc", "output_stack_traces"):
        if about in output.meta:
            output.meta[about] = changed(output.meta[about], [output.meta[about][place]] * len(nodes))


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call put into the graph of a node at its insertion point, with what the node says of where it comes from."""
    node = insert(like.graph, target, *args)
    take_place(node, like.meta)
    return node


def _tell(plan: Any, patches: dict[str, Any]) -> None:
    """Has the partitioner make forwards that save so. The report tells of it once: a graph of a first step saves the
    same."""
    saved, report = plan.options.saved, plan.outcome.report

    def tell(rows: Sequence[SavedSite]) -> None:
        report.saved.extend([] if report.saved else rows)

    theirs = patches.get(_PARTITIONER, getattr(config, _PARTITIONER))
    entries = (("*", saved),) if isinstance(saved, str) else saved
    nodes = (node for module in plan.graph_modules() for node in module.graph.nodes)
    modules = [] if isinstance(saved, str) else [module_path(node) for node in nodes]
    patches[_PARTITIONER] = SavingPartitioner(theirs, entries, tell, modules)
    patches.setdefault("realize_reads_threshold", MOST_READS_WITH_SCALES)


def _finish(options: Options, report: Report) -> None:
    """Say once of a graph that it saves nothing in low precision, though the option asks for it: what
    `options["fallback"]` says.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    saved, globs, fallback = report.saved, options.saves_low, options.fallback
    if saved:
        log.info("%s", table_of_saved(Report(saved=[*saved])))
    for site in saved:
        log.debug("%s", site)
    asked = [site for site in saved if not site.outside]
    if saved and not asked:  # no error, as a graph behind a graph break may have what they mean
        places = ", ".join(sorted({site.fqn or "the model itself" for site in saved}))
        text = f"te_inductor: option 'saved' has no effect here: found {', '.join(map(repr, globs))}, expected globs of"
        say(f"{text} modules that read what is saved for the backward: {places}", fallback.replace("error", "warn"))
    if asked and _casts_nothing(saved):
        announce(Report(unmet=[Unmet("saved", site.fqn, str(site.reason)) for site in asked]), fallback)


EFFECT = Effect(lambda options: bool(options.saves_low), _tell, finish=_finish)
