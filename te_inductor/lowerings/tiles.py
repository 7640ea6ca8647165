"""The tiles of Inductor's own kernels that cast or that look for an amax: data, with where each was measured.

# Note [Tiles for casts]
Inductor fuses a producer, its casts and both stores into one 2D pointwise kernel, and tries square tiles of 8 warps on it.
Which tile is fast depends on how many tensors it reads, as each costs registers, and on the dimension in which they are
contiguous: that one wants 128 or 256 elements. The amax of a tensor is a split reduction, which wants many loads in
flight. Nothing else of a kernel changes here, and nothing is autotuned.

Microseconds in the training step of docs/performance.md, before and with these tiles, beside the floor at copy bandwidth
(H200, torch 2.11, triton 3.6, 2026-11-20). Timed alone on the same kernels, the casts' tiles are the best of 44 or within
0.5% of it; the one tile for all amaxes is within 4% of the best of 46 for each::

    cast 14336 x 4096                        88.5 (64 x 64, 4 warps)     62.9    55.6
    SwiGLU + cast, 16384 x 14336            447.6 (64 x 64, 4 warps)    429.7   333.4
    SwiGLU backward + 2 casts               730.3 (64 x 64, 4 warps)    661.2   555.7
    amax 14336 x 4096                        44.8 (Inductor's)           34.4    27.8
    amax of SwiGLU, 16384 x 14336           358.3 (Inductor's)          313.9   222.3
    amaxes of SwiGLU backward               553.5 (Inductor's)          451.4   333.4
"""

from typing import Any

from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

from te_inductor import ops
from te_inductor.lowerings.blocks import loops_of
from te_inductor.recipes.formats import TENSOR, Scope

# By the number of whole tensors read: elements in the dimension in which they are contiguous, elements across, warps.
CAST = {1: (128, 64, 4), 2: (256, 32, 8), 3: (128, 32, 8)}
AMAX = {"XBLOCK": 1, "R0_BLOCK": 4096, "num_warps": 16}
AMAX_FROM = 8 * AMAX["R0_BLOCK"]  # elements a program reduces, below which Inductor's own choice stands


class Choices:
    """Inductor's heuristics with our tiles; everything else is asked of the heuristics in force.

    A kernel of blocks of one row holds whole blocks in registers: one read of them serves amax and cast. Left alone,
    Inductor loops over the 128 elements twice, because the scales' stores are strided or the reduction is an outer one, and
    fuses both copies' casts away from their amaxes: Note [Loops of block copies].
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> Any:
        kernel_kwargs = self._inner.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        tile = None if "fixed_config" in kernel_kwargs else tile_of(features, groups[0])
        return kernel_kwargs if tile is None else {**kernel_kwargs, "fixed_config": FixedTritonConfig(tile)}

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        loops = loops_of(node1), loops_of(node2)
        if all(loops) and loops[0] != loops[1]:
            return False
        return bool(self._inner.can_fuse(scheduler, node1, node2, shared_data_score))

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        widths = {scope.block[1] for scope in _scopes(features) if scope.row_last}
        if any(V.graph.sizevars.statically_known_equals(features.reduction_numel, width) for width in widths):
            return True
        return bool(self._inner.should_use_persistent_reduction(features, cooperative_reduction))


def _scopes(features: Any) -> list[Scope]:
    """Of the quantizations that a kernel is made of."""
    origins = [origin for node in features.scheduler_nodes() for origin in node.node.get_origins()]
    return [o.args[1].granularity for o in origins if o.target in (ops.quantize, ops.quantize_rowcol)]


def tile_of(features: Any, tiling: dict[str, Any]) -> dict[str, int] | None:
    """Our tile for a kernel that quantizes, None where Inductor's choice stands."""
    scopes = _scopes(features)
    if not scopes:
        return None
    dimensions = set(tiling)
    if features.is_reduction():
        long = dimensions == {"x", "r0_"} and V.graph.sizevars.statically_known_geq(tiling["r0_"], AMAX_FROM)
        # The amax of rows may run across the dimension in which the tensor is contiguous.
        return dict(AMAX) if long and TENSOR in scopes else None
    if dimensions - {"r0_"} != {"x", "y"}:
        return None
    return _cast_tile(list(features.scheduler_nodes()), tiling)


def _cast_tile(nodes: list[Any], tiling: dict[str, Any]) -> dict[str, int]:
    """A node of a 2D kernel iterates over (y, x); where its read has coefficient 1, the tensor is contiguous."""
    whole = tiling["y"] * tiling["x"]
    deps = [dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
    reads = [dep for dep in deps if dep.get_numel() == whole]  # and not weights of a norm
    smaller = V.graph.sizevars.statically_known_lt
    reads = [dep for dep in reads if not smaller(V.graph.get_numel(dep.name), whole)]  # nor scales of square blocks
    along, across, warps = CAST[min(max(len({dep.name for dep in reads}), 1), max(CAST))]
    outer = any(len(dep.var_names) == 2 and dep.index.coeff(dep.var_names[0]) == 1 for dep in reads)
    y, x = (along, across) if outer else (across, along)
    return {"XBLOCK": x, "YBLOCK": y, "num_warps": warps}
