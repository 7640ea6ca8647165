"""The pass that has torch overlap the products of tensor-parallel layers with their collectives, where Inductor's
`_micro_pipeline_tp` is set.

torch's pass (`torch/_inductor/fx_passes/micro_pipeline_tp.py`), which runs behind this one, knows `aten._scaled_mm` whose
left operand is gathered or whose result is scattered, and makes one op of both: `symm_mem.fused_all_gather_scaled_matmul`,
`symm_mem.fused_scaled_matmul_reduce_scatter`. So products of ours that stand so become that operator, and the gather one
of FP8 values, in the plainest of the forms that torch knows: matrices, along their first dimension.

Where the ranks' parts lie along a later dimension of x, which has more than one row in front of it, rows are put in
another order around the product. torch's op would scatter other rows than the collective does there: it cuts the rows
of the matrix, of which the dimension that is scattered is the second (torch 2.11 to 2.13,
`_fused_scaled_matmul_reduce_scatter_impl`).

It is done for products with one scale a tensor, the only ones whose gathers are in FP8 (Note [Tensor-parallel layers] in
distributed/parallel.py)."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from te_inductor import ops, targets
from te_inductor.diagnostics import log
from te_inductor.kernels import fp8_small_m
from te_inductor.kernels.select import select
from te_inductor.passes.graph.gemm_nodes import VIEWS, is_plain, problem_of
from te_inductor.passes.graph.tracing import erase, insert
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT

aten = torch.ops.aten
_collectives = torch.ops._c10d_functional
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class _RankRows:
    """How the rows of a matrix are those of a tensor (*sizes, C), of which ranks have parts along `dim`."""

    sizes: tuple[int, ...]
    dim: int

    @property
    def in_order(self) -> bool:
        """Whether the parts lie one behind the other in the matrix."""
        return math.prod(self.sizes[: self.dim]) == 1

    @property
    def to_front(self) -> list[int]:
        """The dimensions of the tensor, `dim` in front."""
        return [self.dim, *(dim for dim in range(len(self.sizes) + 1) if dim != self.dim)]

    def by_part(self, matrix: fx.Node) -> fx.Node:
        """The rows in the order of `dim`."""
        if self.in_order:
            return matrix
        return self._moved(matrix, self.sizes, self.to_front)

    def as_before(self, matrix: fx.Node) -> fx.Node:
        """What `by_part` is undone by."""
        if self.in_order:
            return matrix
        order = self.to_front
        return self._moved(matrix, [self.sizes[dim] for dim in order[:-1]], [order.index(dim) for dim in sorted(order)])

    @staticmethod
    def _moved(matrix: fx.Node, sizes: Sequence[int], order: list[int]) -> fx.Node:
        rows, columns = matrix.meta["val"].shape
        graph = matrix.graph
        moved = insert(graph, aten.reshape.default, matrix, [*sizes, columns])
        moved = insert(graph, aten.permute.default, moved, order)
        moved = insert(graph, aten.clone.default, moved, memory_format=torch.contiguous_format)
        return insert(graph, aten.reshape.default, moved, [rows, columns])


def expose(graph: fx.Graph) -> None:
    """Write products beside gathers and scatters as torch's pass reads them."""
    if not config._micro_pipeline_tp:
        return
    for gather in graph.find_nodes(op="call_function", target=_collectives.all_gather_into_tensor.default):
        _expose_gather(gather)
    for scatter in graph.find_nodes(op="call_function", target=_collectives.reduce_scatter_tensor.default):
        _expose_scatter(scatter)


def _is_pipelined(collective: fx.Node) -> bool:
    """Whether torch's pass takes collectives of that group; where it does not, that is told."""
    from torch.distributed import is_nccl_available
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    group: Any = collective.args[-1]
    if not is_nccl_available():
        _tell("torch was built without NCCL, expected a build with it")
    elif not is_symm_mem_enabled_for_group(group):
        _tell(
            f"process group {group!r} has no symmetric memory, expected it to; call"
            f" torch.distributed._symmetric_memory.enable_symm_mem_for_group({group!r}) before the first step"
        )
    else:
        return True
    return False


@functools.cache
def _tell(why: str) -> None:
    """Says why, once a process."""
    log.warning("_micro_pipeline_tp overlaps no GEMM of tensor-parallel layers with its collective: %s", why)


def _expose_gather(gather: fx.Node) -> None:
    """One of bytes, behind which they are FP8 again: `parallel.gather`."""
    ranks, group = gather.args[1:]
    found = _gathered(gather)
    if found is None:
        return
    shard, whole, dim = found
    products = [node for node in _readers(whole) if _may_run(node)]
    sizes = (*whole.meta["val"].shape[:-1],)
    if not products or not all(isinstance(size, int) for size in sizes) or not _is_pipelined(gather):
        return
    log.debug("async tensor parallelism: %s and %d products behind it", gather, len(products))
    rows, part = _RankRows(sizes, dim), _RankRows((*shard.meta["val"].shape[:-1],), dim)
    columns = shard.meta["val"].shape[-1]
    with gather.graph.inserting_before(gather):
        mine = part.by_part(insert(gather.graph, aten.reshape.default, shard, [math.prod(part.sizes), columns]))
        every = insert(gather.graph, _collectives.all_gather_into_tensor.default, mine, ranks, group)
        every = insert(gather.graph, _collectives.wait_tensor.default, every)
    for product in products:
        with product.graph.inserting_before(product):
            y = rows.as_before(_scaled_mm(every, product))
        product.replace_all_uses_with(y)
    with whole.graph.inserting_before(whole):
        again = insert(gather.graph, aten.reshape.default, rows.as_before(every), [*sizes, columns])
    whole.replace_all_uses_with(again)
    erase(*products, whole)


def _gathered(gather: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """What a gather of bytes sends, the tensor that they are read as, and the dimension along which it was gathered."""
    wire: Any = gather.args[0]
    wait, dim = _only_user(gather), 0
    if wire.target is not aten.view.dtype or wait is None or wait.target is not _collectives.wait_tensor.default:
        return None
    last = _only_user(wait)
    if last is not None and last.target in _SPLITS:
        cat = _joined(last, gather.args[1], 0)
        if cat is None:
            return None
        dim = cat.args[1] if len(cat.args) > 1 else 0  # type: ignore[assignment]
        last = _only_user(cat)
    shard = wire.args[0]
    if last is None or last.target is not aten.view.dtype or last.meta["val"].dtype != shard.meta["val"].dtype:
        return None
    return shard, last, dim


def _expose_scatter(scatter: fx.Node) -> None:
    """One of a product's partial sums: `parallel.reduce`."""
    given, operation, ranks, group = scatter.args
    source, dim = _scattered(given, ranks)  # type: ignore[arg-type]
    product = source
    while product.target in VIEWS and len(product.users) == 1:
        product = product.all_input_nodes[0]
    wait = _only_user(scatter)
    if wait is None or len(product.users) != 1 or len(source.users) != 1 or not _may_run(product):
        return
    sizes = (*source.meta["val"].shape[:-1],)
    columns = source.meta["val"].shape[-1]
    if columns != product.meta["val"].shape[-1] or not all(isinstance(size, int) for size in sizes):
        return
    if not _is_pipelined(scatter):
        return
    log.debug("async tensor parallelism: %s and the product in front of it", scatter)
    rows = _RankRows(sizes, dim)
    part = _RankRows((*wait.meta["val"].shape[:-1],), dim)
    with scatter.graph.inserting_before(wait):
        y = _scaled_mm(rows.by_part(product.args[0]), product)  # type: ignore[arg-type]
        y = insert(scatter.graph, _collectives.reduce_scatter_tensor.default, y, operation, ranks, group)
        y = part.as_before(insert(scatter.graph, _collectives.wait_tensor.default, y))
        y = insert(scatter.graph, aten.reshape.default, y, [*wait.meta["val"].shape])
    wait.replace_all_uses_with(y)
    erase(wait)


def _scattered(given: fx.Node, ranks: int) -> tuple[fx.Node, int]:
    """The tensor whose parts along a dimension lie one behind the other in what is scattered, and the dimension."""
    if given.target is aten.cat.default and (len(given.args) == 1 or given.args[1] == 0) and len(given.users) == 1:
        first: Any = given.args[0][0]  # type: ignore[index]
        split: Any = first.args[0] if first.target is operator.getitem else None
        if split is not None and split.target in _SPLITS and _joined(split, ranks, _dim(split)) is given:
            return split.args[0], _dim(split)
    return given, 0


def _dim(split: fx.Node) -> int:
    return split.args[2] if len(split.args) > 2 else 0  # type: ignore[return-value]


def _joined(split: fx.Node, ranks: Any, dim: int) -> fx.Node | None:
    """What alone reads all of `ranks` equal parts of a split along `dim`, in order: a concatenation."""
    parts: list[Any] = list(split.users)
    if (
        not parts
        or _dim(split) != dim
        or not all(part.target is operator.getitem and len(part.users) == 1 for part in parts)
    ):
        return None
    parts.sort(key=lambda part: part.args[1])
    [cat] = parts[0].users
    alike = len({tuple(part.meta["val"].shape) for part in parts}) == 1
    is_cat = cat.target is aten.cat.default and list(cat.args[0]) == parts
    return cat if is_cat and alike and len(parts) == ranks else None


def _readers(whole: fx.Node) -> Iterator[fx.Node]:
    """GEMMs whose left operand is a tensor, as a matrix."""
    columns = whole.meta["val"].shape[-1]
    for user in whole.users:
        if user.target is ops.scaled_mm:
            if user.args[0] is whole and whole not in user.args[1:]:
                yield user
        elif user.target in VIEWS and user.meta["val"].shape[-1] == columns:
            yield from _readers(user)


def _may_run(product: fx.Node) -> bool:
    """Whether `aten._scaled_mm` runs it: one scale a tensor, sizes that cuBLASLt takes, on a device with FP8 GEMMs."""
    if product.target is not ops.scaled_mm or not is_plain(product):
        return False
    gemm: Gemm = product.args[5]  # type: ignore[assignment]
    sizes = (*product.meta["val"].shape, product.args[0].meta["val"].shape[1])  # type: ignore[union-attr]
    if gemm.blocked or gemm.scopes != ("tensor", "tensor") or not all(isinstance(size, int) for size in sizes):
        return False
    fits = sizes[1] % ALIGNMENT == 0 and sizes[2] % ALIGNMENT == 0
    return (
        fits and _has_fp8(product.meta["val"].device) and select(problem_of(product)).family is not fp8_small_m.FAMILY
    )


def _has_fp8(device: torch.device) -> bool:
    return targets.Ability.FP8 in targets.of(device).can


def _scaled_mm(a: fx.Node, product: fx.Node) -> fx.Node:
    """The product with `a` in the place of its left operand."""
    graph = product.graph
    _, a_scale, b, b_scale, bias, gemm, out = product.args[:7]
    transposed = insert(graph, aten.permute.default, b, [1, 0])
    early = bias if bias is None or bias.meta["val"].dtype == out == torch.bfloat16 else None  # type: ignore[union-attr]
    y = insert(graph, aten._scaled_mm.default, a, transposed, a_scale, b_scale, early, None, out, gemm.fast_accum)  # type: ignore[union-attr]
    if bias is early:
        return y
    return insert(graph, aten.add.Tensor, y, insert(graph, torch.ops.prims.convert_element_type.default, bias, out))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
