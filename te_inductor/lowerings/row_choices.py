"""What Inductor fuses, and with which tiles, where a row's sums are made in one order: Note [Rows by themselves] in
passes/pre_grad/decide/invariance.py."""

from typing import Any

from torch._inductor.virtualized import V

from te_inductor.lowerings.choices import Choices
from te_inductor.lowerings.codegen import block_tiles, ordered_sums
from te_inductor.lowerings.codegen.tiles import LOOKS

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
