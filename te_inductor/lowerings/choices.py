"""What Inductor fuses of kernels that quantize, and with which tiles (tiles.py), also where a row's sums are made in one
order: Note [Rows by themselves] in passes/pre_grad/decide/invariance.py."""

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V

from te_inductor import ops
from te_inductor.lowerings.casts.blocks import loops_of
from te_inductor.lowerings.codegen import block_tiles, combos, holds_ops_of_ours, ordered_sums, programmatic_launch
from te_inductor.lowerings.codegen.tiles import (
    COPIES,
    LOOKS,
    even_split,
    fits_a_program,
    holds_rows,
    quantizer_of,
    quantizers_of,
    stays_whole,
    tile_of,
)
from te_inductor.lowerings.gemm import cutlass_choices
from te_inductor.ops.casts import TWO_WAY, TWO_WAY_KNOWN


class Choices:
    """Inductor's heuristics with our tiles; everything else is asked of the heuristics in force.

    A kernel of blocks of one row holds whole blocks in registers: one read of them serves amax and cast. Left alone,
    Inductor loops over the 128 elements twice, because the scales' stores are strided or the reduction is an outer one,
    and fuses both copies' casts away from their amaxes: Note [Loops of block copies]."""

    cut_tiles = True  # which tells lowerings that Inductor is ours: others have no such attribute

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> Any:
        kernel_kwargs = self._inner.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        # One that sums rows and columns at once cuts the rows among programs in its own way.
        chosen = "fixed_config" in kernel_kwargs or kernel_kwargs.get("mix_order_reduction", False)
        tile = None if chosen else tile_of(features, groups[0])
        return kernel_kwargs if tile is None else {**kernel_kwargs, "fixed_config": FixedTritonConfig(tile)}

    def get_template_configs(
        self, kernel_inputs: Any, templates: list[Any], op_name: str, kwarg_overrides: Any = None
    ) -> list[Any]:
        choices = self._inner.get_template_configs(kernel_inputs, templates, op_name, kwarg_overrides)
        return (
            cutlass_choices.extend(choices, kernel_inputs, kwarg_overrides)
            if op_name == cutlass_choices.OP
            else choices
        )

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        # Inductor answers first: most pairs share one tensor of scales and nothing else, and it takes no look at nodes
        # to refuse them.
        shared_data_score = max(shared_data_score, *_scores(node1, node2))
        if not self._inner.can_fuse(scheduler, node1, node2, shared_data_score):
            return False
        # A reduction over rows, a norm's or an amax's, holds whole rows, from which a column copy can only be written
        # byte by byte; and what else Inductor would fuse there leaves the column copy to a kernel that reads the tensor
        # again.
        if any(one.is_reduction() and cast_both_ways(other) for one, other in ((node1, node2), (node2, node1))):
            return False
        if not block_tiles.may_share_a_kernel(node1, node2):
            return False
        if _sum_columns_of_different_tensors(node1, node2):
            return False
        both = (node1, node2)
        if any(map(self.stands_alone, both)) and any(combos.is_part(scheduler, node) for node in both):
            return False
        loops = loops_of(node1), loops_of(node2)
        return not all(loops) or loops[0] == loops[1]

    def can_fuse_horizontal(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if (
            shared_data_score > 0 and programmatic_launch.is_early()
        ):  # a launch costs more than any bytes read once more
            shared_data_score = max(shared_data_score, config.score_fusion_memory_threshold)
        shared_data_score = max(shared_data_score, *_scores(node1, node2))
        return bool(self._inner.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    def stands_alone(self, node: Any) -> bool:
        """Whether the kernel of a scheduler node is not to be a part of another: combos.py."""
        return holds_ops_of_ours([node])

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        widths = {q.granularity.block[1] // q.format.packed for q in quantizers_of(features) if q.granularity.one_row}
        if any(V.graph.sizevars.statically_known_equals(features.reduction_numel, width) for width in widths):
            return True
        # A step of generation has few rows, so that a program waits for memory: once, not once a turn of a
        # loop.
        if holds_rows(features) or (programmatic_launch.is_early() and fits_a_program(features)):
            return True
        return bool(self._inner.should_use_persistent_reduction(features, cooperative_reduction))

    def reduction_split_factor(self, device: Any, elements: int, outputs: int, inner_reduction: bool) -> int:
        split = int(self._inner.reduction_split_factor(device, elements, outputs, inner_reduction=inner_reduction))
        node = getattr(V.graph, "current_node", None)
        if inner_reduction and stays_whole(node, elements):
            return 1
        ours = node is not None and node.target in LOOKS and inner_reduction and outputs == 1 and split > 1
        return even_split(elements, split) if ours else split

    def score_fusion(self, scheduler: Any, node1: Any, node2: Any) -> Any:
        """A sort key: both copies of a tensor find each other before either finds somebody else's kernel."""
        together = bool(cast_both_ways(node1) & cast_both_ways(node2))
        return together, self._inner.score_fusion(scheduler, node1, node2)


def _scores(node1: Any, node2: Any) -> tuple[int, int]:
    return _score_of_unknown_sizes(node1, node2), _score_of_blocks(node1, node2)


def _score_of_blocks(node1: Any, node2: Any) -> int:
    """The bytes that two nodes read both, where one reads a row in blocks of which it makes a copy, and the other as it
    lies in memory. Inductor brings loops together by one read of each tensor, the last: gate and up are two of one
    tensor, so that the copy of up joined SwiGLU's kernel, and that of gate was a kernel that read it once more."""
    if not loops_of(node1) and not loops_of(node2):
        return 0
    reads = (node.read_writes.reads for node in (node1, node2))
    both = [{dep.normalize() for dep in each if isinstance(dep, MemoryDep)} for each in reads]
    return sum(dep.numbytes_hint() for dep in both[0] & both[1])


def _score_of_unknown_sizes(node1: Any, node2: Any) -> int:
    """What Inductor's score of shared data would be enough of, where data is shared of which no size is known, as rows
    from other ranks. It counts them as no bytes, so that a scale, which is shared too, is too little, and has each of
    their readers read them again."""
    if not V.graph.sizevars.shape_env.var_to_range:
        return 0  # all sizes are numbers
    both = [node.read_writes.reads | node.read_writes.writes for node in (node1, node2)]
    unknown = any(isinstance(dep, MemoryDep) and dep.has_unbacked_symbols() for dep in both[0] & both[1])
    return config.score_fusion_memory_threshold if unknown else 0


def _sum_columns_of_different_tensors(node1: Any, node2: Any) -> bool:
    """Whether each is the weight gradient of a norm of its own. Inductor adds such sums to the reduction over rows that
    reads the same tensors; together, for the sake of one that both read, one would read its own once more: 447 us for
    two norms of 16384 x 4096 that take 303 apart (H200, torch 2.11, 2026-11-22)."""
    split = MixOrderReduction.is_split_reduction
    if not (config.triton.mix_order_reduction and split(node1) and split(node2)):
        return False
    reads1, reads2 = ({dep.name for dep in node.read_writes.reads} for node in (node1, node2))
    return not (reads1 <= reads2 or reads2 <= reads1)


def cast_both_ways(node: Any) -> set[Any]:
    """The tensors of the graph whose row copy, column copy or recorded amax a scheduler node makes, where both copies
    are made: that wants one 2D tile."""
    found: set[Any] = set()
    for part in node.get_nodes():
        for origin in part.node.get_origins() if part.node else ():
            if origin.target is ops.record_amax or _wants_a_tile(part.node, origin):
                found.update(x for x in _tensors(origin.args[0]) if any(map(_makes_columns, x.users)))
    return found


def _wants_a_tile(buffer: Any, origin: Any) -> bool:
    """Both copies from one read; but copies with blocks of one row that are no tiles each join their amax (Note [Loops
    of block copies])."""
    if not _makes_columns(origin):
        return False
    return block_tiles.is_tiled(buffer) or (_is_copy(buffer) and not quantizer_of(origin).granularity.one_row)


def _makes_columns(origin: Any) -> bool:
    """Whether it casts both ways, and somebody reads the column copy. Row copies join the reduction that finds their
    rows' scales, or the norm that makes the tensor. (Square blocks are tiles either way.)"""
    if origin.target not in TWO_WAY:
        return False
    first = 1 if origin.target in TWO_WAY_KNOWN else 2  # of what it gives, behind data, or data and scale_inv
    scope = quantizer_of(origin).granularity
    return (scope.blocked and not scope.one_row) or any(user.args[1] >= first for user in origin.users)


def _is_copy(buffer: Any) -> bool:
    """Whether a buffer holds a copy, and not a scale."""
    return any(output.get_dtype() in COPIES for output in buffer.get_outputs())


def _tensors(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


LONGEST_ROW = 2**18  # elements, as vocabularies have words
_ORDERLESS = frozenset(("max", "min", "any", "argmax", "argmin", "xor_sum"))  # reductions, the same in any order


class RowChoices(Choices):
    """Our heuristics, but for the sums of forwards."""

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> Any:
        if _sums_rows(features.scheduler_nodes()):
            given = self._inner.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            return {**given, "fixed_config": ordered_sums.fixed_config()}
        return super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        # A kernel that casts blocks holds whole rows, and would sum them otherwise than one that does not.
        if _sums_rows((node1, node2)) and block_tiles.matrices([*node1.get_nodes(), *node2.get_nodes()]):
            return False
        return super().can_fuse(scheduler, node1, node2, shared_data_score)

    def stands_alone(self, node: Any) -> bool:
        return _sums_rows((node,)) or super().stands_alone(node)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        if _sums_rows(features.scheduler_nodes()):
            return False
        return super().should_use_persistent_reduction(features, cooperative_reduction)

    def reduction_split_factor(self, device: Any, elements: int, outputs: int, inner_reduction: bool) -> int:
        if inner_reduction and _may_be_a_row(elements, outputs):
            return 1
        return super().reduction_split_factor(device, elements, outputs, inner_reduction)


def choices(inner: Any, rows_alone: bool) -> Choices:
    """Our heuristics over those in force, with those of `RowChoices` where rows depend on no other row."""
    return (RowChoices if rows_alone else Choices)(inner)


def _may_be_a_row(elements: int, outputs: int) -> bool:
    """Whether several programs for one sum could be several for one row. A sum of more elements than rows have, and of
    nothing beside it, is one of a batch, such as a loss."""
    node = getattr(V.graph, "current_node", None)
    looks = node is not None and node.target in LOOKS  # for an amax, the same in any order
    return not V.graph.is_backward and not looks and (outputs > 1 or elements <= LONGEST_ROW)


def _sums_rows(nodes: Any) -> bool:
    """Whether sums of some of these nodes are made in one order."""
    if V.graph.is_backward:
        return False
    parts = (part for node in nodes for part in node.get_nodes() if part.node is not None)
    kinds = {part.node.get_reduction_type() for part in parts if part.is_reduction()}
    return not kinds <= _ORDERLESS
