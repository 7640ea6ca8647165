"""The tiles of Inductor's own kernels that cast or that look for an amax: data, with where each was measured.

# Note [Tiles for casts]
Inductor fuses a producer, its casts and both stores into one 2D pointwise kernel, and tries square tiles of 8 warps on it.
Which tile is fast depends on how many tensors it reads, as each costs registers, and on the dimension in which they are
contiguous: that one wants 128 elements, unless registers keep further blocks off the multiprocessor. The amax of a tensor is
a split reduction, which wants many loads in flight. Nothing else of a kernel changes here, and nothing is autotuned.

Microseconds of the kernels of docs/performance.md's training step under delayed scaling, each with row copy, column copy and
amax (H200, torch 2.11, triton 3.6, 2026-11-21): 128 x 64 with 4 warps, the best of 8 tiles and the tile taken here::

                                    reads    4 warps     best     here
    gradient, 16384 x 4096              1       69.2     68.9     68.9
    RMSNorm, 16384 x 4096               1       97.4     79.3     79.3
    residual + RMSNorm                  2      131.6     94.5     94.5
    SwiGLU, 16384 x 14336               2      403.7    349.3    349.3
    gate's and up's weights             2      150.0    142.5    147.2

SwiGLU's backward (3 reads) takes 758 us in a step with 128 x 32 and 8 warps, and 838 with 32 x 64 and 4, which was the
faster one, 583 us for 735, behind GEMMs alone: what counts is the step.

A tile that is a block (block_tiles.py) leaves the warps to choose. Behind the same GEMMs, microseconds with 4 and 8, and 16
with as few registers as let two tiles share a multiprocessor, which Inductor cannot ask for::

    gradient, 16384 x 4096        110    104    198
    RMSNorm, 16384 x 4096         174     95    157
    SwiGLU, 16384 x 14336         552    494    716
    its gate's gradient, 3 reads  676    577    790

The one tile for all amaxes of current scaling is within 4% of the best of 46 for each (2026-11-20): 14336 x 4096 34.4 us
where Inductor's takes 44.8, SwiGLU 313.9 (358.3), SwiGLU backward 451.4 (553.5).
"""

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V

from te_inductor import ops
from te_inductor.lowerings import block_tiles, early_start, gemm_choices
from te_inductor.lowerings.blocks import loops_of
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ELEMENTS, ROW, TENSOR

# By the number of whole tensors read: elements in the dimension in which they are contiguous, elements across, warps.
CAST = {1: (128, 64, 8), 2: (128, 64, 8), 3: (128, 32, 8)}
BLOCK_WARPS = 8  # of a kernel whose tile is a block
FLAT = {"XBLOCK": 8192, "num_warps": 8}  # of a row copy and amax alone: a program looks for the largest of its elements
AMAX = {"XBLOCK": 1, "R0_BLOCK": 4096, "num_warps": 16}
# The ops that cast or look for a scale, and among them those that cast both ways; the dtypes of copies.
CASTS = (ops.quantize, ops.quantize_delayed, ops.current_scale)
TWO_WAY = (ops.quantize_rowcol, ops.quantize_pieces, ops.quantize_rowcol_delayed, ops.quantize_pieces_delayed)
COPIES = {element.dtype for element in ELEMENTS.values() if element.packed == 1}
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

    def get_template_configs(
        self, kernel_inputs: Any, templates: list[Any], op_name: str, kwarg_overrides: Any = None
    ) -> list[Any]:
        choices = self._inner.get_template_configs(kernel_inputs, templates, op_name, kwarg_overrides)
        return gemm_choices.extend(choices, kernel_inputs, kwarg_overrides) if op_name == gemm_choices.OP else choices

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        # A reduction over rows, a norm's or an amax's, holds whole rows, from which a column copy can only be written byte
        # by byte; and what else Inductor would fuse there leaves the column copy to a kernel that reads the tensor again.
        if any(one.is_reduction() and cast_both_ways(other) for one, other in ((node1, node2), (node2, node1))):
            return False
        if not block_tiles.may_share_a_kernel(node1, node2):
            return False
        if _sum_columns_of_different_tensors(node1, node2):
            return False
        loops = loops_of(node1), loops_of(node2)
        if all(loops) and loops[0] != loops[1]:
            return False
        return bool(self._inner.can_fuse(scheduler, node1, node2, shared_data_score))

    def can_fuse_horizontal(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if shared_data_score > 0 and early_start.is_early():  # a launch costs more than any bytes read once more
            shared_data_score = max(shared_data_score, config.score_fusion_memory_threshold)
        return bool(self._inner.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        widths = {q.granularity.block[1] // q.format.packed for q in _quantizers(features) if q.granularity.one_row}
        if any(V.graph.sizevars.statically_known_equals(features.reduction_numel, width) for width in widths):
            return True
        if early_start.is_early() and early_start.fits_a_program(features):
            return True
        return bool(self._inner.should_use_persistent_reduction(features, cooperative_reduction))

    def score_fusion(self, scheduler: Any, node1: Any, node2: Any) -> Any:
        """A sort key: both copies of a tensor find each other before either finds somebody else's kernel."""
        together = bool(cast_both_ways(node1) & cast_both_ways(node2))
        return together, self._inner.score_fusion(scheduler, node1, node2)


def _sum_columns_of_different_tensors(node1: Any, node2: Any) -> bool:
    """Whether each is the weight gradient of a norm of its own. Inductor adds such sums to the reduction over rows that reads
    the same tensors; together, for the sake of one that both read, one would read its own once more: 447 us for two norms
    of 16384 x 4096 that take 303 apart (H200, torch 2.11, 2026-11-22)."""
    split = MixOrderReduction.is_split_reduction
    if not (config.triton.mix_order_reduction and split(node1) and split(node2)):
        return False
    reads1, reads2 = ({dep.name for dep in node.read_writes.reads} for node in (node1, node2))
    return not (reads1 <= reads2 or reads2 <= reads1)


def cast_both_ways(node: Any) -> set[Any]:
    """The tensors of the graph whose row copy, column copy or recorded amax a scheduler node makes, where both copies are
    made: that wants one 2D tile."""
    found: set[Any] = set()
    for part in node.get_nodes():
        for origin in part.node.get_origins() if part.node else ():
            if origin.target is ops.record_amax or _wants_a_tile(part.node, origin):
                found.update(x for x in _tensors(origin.args[0]) if any(user.target in TWO_WAY for user in x.users))
    return found


def _wants_a_tile(buffer: Any, origin: Any) -> bool:
    """Both copies from one read; but copies with blocks of one row that are no tiles each join their amax (Note [Loops of
    block copies]), and so does a row copy of rows whose column copy nobody reads."""
    if origin.target not in TWO_WAY or (_quantizer(origin).granularity is ROW and _is_row_copy(origin)):
        return False
    return block_tiles.is_tiled(buffer) or (_is_copy(buffer) and not _quantizer(origin).granularity.one_row)


def _is_row_copy(origin: Any) -> bool:
    """Whether nobody reads the column copy, or its scales, that an op makes."""
    return all(user.args[1] < 2 for user in origin.users)


def _is_copy(buffer: Any) -> bool:
    """And not a scale."""
    return any(output.get_dtype() in COPIES for output in buffer.get_outputs())


def _origins(features: Any) -> list[Any]:
    return [origin for node in features.scheduler_nodes() for origin in node.node.get_origins()]


def _quantizers(features: Any) -> list[Quantizer]:
    """Of the quantizations that a kernel is made of."""
    return [_quantizer(origin) for origin in _origins(features) if origin.target in (*CASTS, *TWO_WAY)]


def _quantizer(origin: Any) -> Quantizer:
    [quantizer] = [argument for argument in origin.args if isinstance(argument, Quantizer)]
    return quantizer


def _tensors(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


def tile_of(features: Any, tiling: dict[str, Any]) -> dict[str, int] | None:
    """Our tile for a kernel that quantizes, None where Inductor's choice stands."""
    scopes = [quantizer.granularity for quantizer in _quantizers(features)]
    if not scopes or any(scope.microscaled for scope in scopes):  # not measured: emulation is not about speed
        return None
    nodes = list(features.scheduler_nodes())
    if block_tiles.matrices(nodes):
        return {"XBLOCK": block_tiles.TILE, "YBLOCK": block_tiles.TILE, "num_warps": BLOCK_WARPS}
    dimensions = set(tiling)
    if features.is_reduction():
        long = dimensions == {"x", "r0_"} and V.graph.sizevars.statically_known_geq(tiling["r0_"], AMAX_FROM)
        # The amax of rows may run across the dimension in which the tensor is contiguous.
        return dict(AMAX) if long and TENSOR in scopes else None
    if dimensions - {"r0_"} == {"x", "y"}:
        return _cast_tile(nodes, tiling)
    records = any(origin.target is ops.record_amax for origin in _origins(features))
    return dict(FLAT) if records and dimensions - {"r0_"} == {"x"} else None


def _cast_tile(nodes: list[Any], tiling: dict[str, Any]) -> dict[str, int]:
    """A node of a 2D kernel iterates over (y, x); where its read has coefficient 1, the tensor is contiguous."""
    whole = tiling["y"] * tiling["x"]
    deps = [dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
    reads = [dep for dep in deps if dep.get_numel() == whole]  # and not weights of a norm
    smaller = V.graph.sizevars.statically_known_lt
    reads = [dep for dep in reads if not smaller(V.graph.get_numel(dep.name), whole)]  # nor scales of square blocks
    # Two slices of one buffer are two; the same slice read in either order of the loops is one.
    slices = {(dep.name, dep.index.subs(dict.fromkeys(dep.var_names, 0))) for dep in reads}
    along, across, warps = CAST[min(max(len(slices), 1), max(CAST))]
    outer = any(len(dep.var_names) == 2 and dep.index.coeff(dep.var_names[0]) == 1 for dep in reads)
    y, x = (along, across) if outer else (across, along)
    return {"XBLOCK": x, "YBLOCK": y, "num_warps": warps}
