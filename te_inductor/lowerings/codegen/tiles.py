"""The tiles of Inductor's own kernels that cast or that look for an amax: data, with where each was measured.

# Note [Tiles for casts]
Inductor fuses a producer, its casts and both stores into one 2D pointwise kernel, and tries square tiles of 8 warps on
it. Which tile is fast depends on how many tensors it reads, as each costs registers, and on the dimension in which they
are contiguous: that one wants 128 elements, unless registers keep further blocks off the multiprocessor. The amax of a
tensor is a split reduction, which wants many loads in flight. Nothing else of a kernel changes here, and nothing is
autotuned.

Microseconds of the kernels of docs/ledger.md's training step under delayed scaling, each with row copy, column
copy and amax (H200, torch 2.11, triton 3.6, 2026-11-21): 128 x 64 with 4 warps, the best of 8 tiles and the tile taken
here::

                                    reads    4 warps     best     here
    gradient, 16384 x 4096              1       69.2     68.9     68.9
    RMSNorm, 16384 x 4096               1       97.4     79.3     79.3
    residual + RMSNorm                  2      131.6     94.5     94.5
    SwiGLU, 16384 x 14336               2      403.7    349.3    349.3
    gate's and up's weights             2      150.0    142.5    147.2

SwiGLU's backward (3 reads) takes 758 us in a step with 128 x 32 and 8 warps, and 838 with 32 x 64 and 4, which was the
faster one, 583 us for 735, behind GEMMs alone: what counts is the step. With pairs of rows 690 with 64 x 64 and 4,
where 128 x 32 without takes 719; 735 with 128 x 64 and 8 (2026-11-22).

GELU's backward (2 reads) casts GELU itself and its gradient: two column copies, and more instructions than SwiGLU's. So
it counts as 3. The gradient of cross entropy reads one tensor and four values a row (labels, maximum, sum, weight), for
which few warps with many rows each are three times as fast; LayerNorm, which reads four values too, takes the same time.
Microseconds of the kernels alone, by rows or columns that are contiguous, others and warps (2026-11-26; GELU with pairs
of rows, and with a polynomial of five terms for erf, where ptx.py's has ten)::

    tile                          128, 64, 8    128, 64, 4    64, 64, 4    64, 64, 2    32, 32, 1    bytes
    GELU's backward, 8192 x 4096         132           153          117          150          118       58
    cross entropy, 16384 x 128256       9129          6334         5450         2779         3111     2100
    cross entropy, 8192 x 8192           345           216          216          147          121       67
    LayerNorm, 8192 x 1024                16            16           16           15           15        8

A tile that is a block (block_tiles.py) leaves the warps to choose. Behind the same GEMMs, microseconds with 4 and 8,
and 16 with as few registers as let two tiles share a multiprocessor, which Inductor cannot ask for::

    gradient, 16384 x 4096        110    104    198
    RMSNorm, 16384 x 4096         174     95    157
    SwiGLU, 16384 x 14336         552    494    716
    its gate's gradient, 3 reads  676    577    790

Rotary positions' gradient, 3 places of one tensor, takes 156 us with 4 and 188 with 8 (2026-11-22).

A column copy alone has blocks of 128 rows, so that its tile may have fewer columns. Of a norm's output, 16384 x 4096,
behind a GEMM, microseconds by columns and warps, without and with pairs of rows (2026-11-23; 47 are the bytes')::

    columns, warps    128, 8    128, 16    64, 4    64, 8    64, 16    32, 4    32, 8
                        82.0      107.6    106.0     71.6     113.7     99.7     95.2
                        73.6      101.3    107.2     65.4     111.9    101.7     78.9

A norm that writes its row copy, or finds its amax, takes a row at once. 16384 x 4096, the row copy and the recorded
amax, microseconds by rows and warps (2026-11-22; 48.7 are the bytes')::

    rows, warps    1, 2    1, 4    1, 8    1, 16    2, 4    2, 8    4, 8
                   52.2    51.9    56.8     68.8    70.2    78.3    67.8

The one tile for all amaxes of current scaling is within 4% of the best of 46 for each (2026-11-20): 14336 x 4096 34.4
us where Inductor's takes 44.8, SwiGLU 313.9 (358.3), SwiGLU backward 451.4 (553.5)."""

import collections
import math
from typing import Any

import torch
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.runtime.runtime_utils import next_power_of_2
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from te_inductor import ops
from te_inductor.lowerings.codegen import block_tiles
from te_inductor.lowerings.codegen.block_tiles import ROW, ROW_A_WARP
from te_inductor.ops.casts import CASTS
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ELEMENTS, TENSOR

# The tiles, by the number of whole tensors read: elements in the dimension in which they are contiguous, elements
# across, warps.
CAST = {1: (128, 64, 8), 2: (128, 64, 8), 3: (128, 32, 8)}
PAIRED = {3: (64, 64, 4)}  # with Note [Pairs of rows]
OF_ROWS = (64, 64, 2)  # of one that reads one tensor and, for each row or column, `VALUES_A_ROW` values or more
VALUES_A_ROW = 3
BLOCK_WARPS = 8  # of a kernel whose tile is a block
COLUMNS_ALONE = (64, 8)  # columns and warps of one that makes a column copy alone
ROTARY_WARPS = 4  # of one that reads three places of a tensor for each element, as rotary positions' gradient does
FLAT = {"XBLOCK": 8192, "num_warps": 8}  # of a row copy and amax alone: a program looks for the largest of its elements
FLAT_OF_THREE = {"XBLOCK": 4096, "num_warps": 8}  # that reads three tensors: half the registers, as CAST has it
PLACED = {"XBLOCK": 8192, "num_warps": 8}  # of rows that are copied byte by byte: 32 bytes a thread, of 8 by default
UNKNOWN = {"XBLOCK": 1024, "num_warps": 4}  # of elements of which no number is known: torch 2.11 takes them for 8192
AMAX = {"XBLOCK": 1, "R0_BLOCK": 4096, "num_warps": 16}
LOOKS = (ops.current_scale, ops.tensor_amax, ops.quantize, ops.quantize_rowcol)  # that may read the tensor for its amax
_EXPONENTIALS = (torch.ops.aten.exp, torch.ops.aten.erfc, torch.ops.aten.sigmoid)
COPIES = {element.dtype for element in ELEMENTS.values() if not element.coded}  # dtypes of copies
_PROGRAMS = 256  # that keep a device busy
# Elements of a row that a program holds at most where there are so few rows that Inductor cuts longer ones than ROW: two
# a multiprocessor. The parts' amaxes, the largest of them and the cast are three kernels.
LONG_ROW, FEW_ROWS = 2 * ROW, 263
AMAX_FROM = 8 * AMAX["R0_BLOCK"]  # elements a program reduces, below which Inductor's own choice stands


def stays_whole(node: Any, elements: int) -> bool:
    """Whether a node of the graph is a row copy with a scale a row, of few rows, each of which a program holds."""
    if node is None or node.target is not ops.quantize or elements > LONG_ROW:
        return False
    scope, x = quantizer_of(node).granularity, node.args[0].meta["val"]
    return not (scope.whole or scope.blocked) and statically_known_true(math.prod(x.shape[:-1]) <= FEW_ROWS)


def even_split(elements: int, split: int) -> int:
    """Returns a number near `split`, into how many parts Inductor cuts a tensor for an amax: such that each is whole
    tiles. Where a part begins at no multiple of a vector, values are loaded one by one: SwiGLU, 16384 x 8192, 278 us,
    where 126 are the bytes', in 528 parts of 254201; 16384 x 14336 221, the bytes', in 1792 of 131072 (H200, torch
    2.11, 2026-11-23)."""
    tiles, left = divmod(elements, AMAX["R0_BLOCK"])
    near = (parts for parts in range(split // 2 + 1, 2 * split) if left == 0 and tiles % parts == 0)
    return min(near, key=lambda parts: abs(parts - split), default=split)


def _origins(features: Any) -> list[Any]:
    return [origin for node in features.scheduler_nodes() for origin in node.node.get_origins()]


def quantizers_of(features: Any) -> list[Quantizer]:
    """The quantizers of the quantizations that a kernel is made of."""
    return [quantizer_of(origin) for origin in _origins(features) if origin.target in (*CASTS, ops.current_scale)]


def quantizer_of(origin: Any) -> Quantizer:
    [quantizer] = [argument for argument in origin.args if isinstance(argument, Quantizer)]
    return quantizer


def tile_of(features: Any, tiling: dict[str, Any]) -> dict[str, int] | None:
    """Our tile for a kernel that quantizes, or of unknown size; None where Inductor's choice stands."""
    tile = dict(PLACED) if _places_bytes(features, tiling) else _tile_of_casts(features, tiling)
    elements = tiling["x"] if set(tiling) <= {"x", "r0_"} and not features.is_reduction() else 0
    return dict(UNKNOWN) if tile is None and free_unbacked_symbols(elements) else tile


def _places_bytes(features: Any, tiling: dict[str, Any]) -> bool:
    """Whether a kernel does nothing but put rows of FP8 where they belong, and has a program for each multiprocessor."""
    nodes = list(features.scheduler_nodes())
    if features.is_reduction() or set(tiling) - {"r0_"} != {"x"} or len(nodes) != 1:
        return False
    placed = any(origin.target is ops.place_rows for origin in nodes[0].node.get_origins())
    large = V.graph.sizevars.statically_known_geq(tiling["x"], _PROGRAMS * PLACED["XBLOCK"])
    return placed and nodes[0].node.get_dtype() in COPIES and bool(large)


def _tile_of_casts(features: Any, tiling: dict[str, Any]) -> dict[str, int] | None:
    scopes = [quantizer.granularity for quantizer in quantizers_of(features)]
    if not scopes or any(scope.microscaled for scope in scopes):  # not measured: emulation is not about speed
        return None
    nodes = list(features.scheduler_nodes())
    dimensions = set(tiling)
    if block_tiles.matrices(nodes) and not features.is_reduction():
        return _block_tile(nodes, tiling)
    if holds_rows(features):
        return {"XBLOCK": 1, "num_warps": next_power_of_2(int(features.reduction_numel)) // ROW_A_WARP}
    if features.is_reduction():
        long = dimensions == {"x", "r0_"} and V.graph.sizevars.statically_known_geq(tiling["r0_"], AMAX_FROM)
        # The amax of rows may run across the dimension in which the tensor is contiguous.
        return dict(AMAX) if long and TENSOR in scopes else None
    if dimensions - {"r0_"} == {"x", "y"}:
        return _cast_tile(nodes, tiling)
    records = any(origin.target is ops.record_amax for origin in _origins(features))
    if not records or dimensions - {"r0_"} != {"x"}:
        return None
    return dict(FLAT_OF_THREE if len(_slices(_reads(nodes, tiling))) >= max(CAST) else FLAT)


def fits_a_program(features: Any, most: int = ROW) -> bool:
    """Whether a reduction of rows, a norm's, may take them whole."""
    if not V.graph.sizevars.statically_known_leq(features.reduction_numel, most):
        return False
    hint = features.get_reduction_hint()
    return bool(hint == ReductionHint.INNER or (hint == ReductionHint.DEFAULT and _reduces_gathered_rows(features)))


def _reduces_gathered_rows(features: Any) -> bool:
    """Whether all goes along rows, some of which are read or written at places that Inductor does not know: then it has
    no hint."""
    nodes = features.scheduler_nodes()
    deps = [dep for node in nodes for dep in (*node.read_writes.reads, *node.read_writes.writes)]
    whole = [
        dep
        for dep in deps
        if isinstance(dep, MemoryDep)
        and dep.var_names
        and sympy_product(dep.size) == features.numel * features.reduction_numel
    ]
    along = all(dep.index.coeff(dep.var_names[-1]) == 1 for dep in whole)
    return along and any(dep.is_indirect() for dep in whole)


def holds_rows(features: Any) -> bool:
    """Whether a kernel that quantizes is a reduction of rows, a norm's, each of which a program can hold: it reads them
    once, where a loop would read them again for what depends on the sum."""
    if block_tiles.matrices(features.scheduler_nodes()):
        return bool(features.is_reduction())  # Note [Rows that hold blocks]
    scopes = [quantizer.granularity for quantizer in quantizers_of(features)]
    if not scopes or any(scope.blocked for scope in scopes):
        return False
    rows, row = features.numel, features.reduction_numel
    most = LONG_ROW if V.graph.sizevars.statically_known_leq(rows, FEW_ROWS) else ROW
    if not (fits_a_program(features, most) and row.is_number and row >= ROW_A_WARP):
        return False
    whole = V.graph.sizevars.statically_known_equals
    return sum(bool(whole(sympy_product(node.group[1]), rows * row)) for node in features.scheduler_nodes()) > 1


def _cast_tile(nodes: list[Any], tiling: dict[str, Any]) -> dict[str, int]:
    reads, row = _reads(nodes, tiling), _row(nodes, tiling)
    tiles = CAST if paired_dimension(nodes, tiling) is None else PAIRED
    along, across, warps = OF_ROWS if _is_of_rows(nodes, tiling) else tiles[row]
    y, x = (along, across) if any(_along(dep, tiling) == "y" for dep in reads) else (across, along)
    return {"XBLOCK": x, "YBLOCK": y, "num_warps": warps}


def _block_tile(nodes: list[Any], tiling: dict[str, Any]) -> dict[str, int]:
    [matrix] = block_tiles.matrices(nodes)
    if matrix.alone and matrix.rows != matrix.columns:  # or nothing tells one from the other
        (wide, warps), sizes = COLUMNS_ALONE, matrix.cuts(nodes)
        y, x = (block_tiles.TILE, wide) if sizes == (matrix.rows, matrix.columns) else (wide, block_tiles.TILE)
        return {"XBLOCK": x, "YBLOCK": y, "num_warps": warps}
    places = collections.Counter(name for name, _ in _slices(_reads(nodes, tiling)))
    warps = ROTARY_WARPS if max(places.values(), default=0) > 2 else BLOCK_WARPS
    return {"XBLOCK": block_tiles.TILE, "YBLOCK": block_tiles.TILE, "num_warps": warps}


def paired_dimension(nodes: list[Any], sizes: dict[str, Any]) -> str | None:
    """Returns the dimension in which the tensors read are not contiguous, of a tile that is stored both ways as FP8 by a
    kernel with many instructions, or as a column copy of blocks. Note [Pairs of rows] in column_pairs.py."""
    if "y" not in sizes:
        return None
    reads = _reads(nodes, sizes)
    if not block_tiles.matrices(nodes) and _row(nodes, sizes) not in PAIRED:
        return None
    writes = [dep for node in nodes for dep in node.read_writes.writes if isinstance(dep, MemoryDep)]
    stored = {_along(dep, sizes) for dep in writes if V.graph.get_dtype(dep.name) in COPIES}
    read = {_along(dep, sizes) for dep in reads}
    across = "y" if read == {"x"} else "x"
    alone = any(matrix.alone for matrix in block_tiles.matrices(nodes))
    if len(read) != 1 or stored != ({across} if alone else {"x", "y"}):
        return None
    return across if V.graph.sizevars.statically_known_multiple_of(sizes[across], 2) else None


def _row(nodes: list[Any], sizes: dict[str, Any]) -> int:
    """The row of the tables: how many tensors are read, or one more of GELU's backward."""
    exponential = any(
        getattr(origin.target, "overloadpacket", None) in _EXPONENTIALS
        for node in nodes
        for origin in node.node.get_origins()
    )
    more = exponential and len(_column_copies(nodes, sizes)) > 1
    return min(max(len(_slices(_reads(nodes, sizes))), 1) + more, max(CAST))


def _column_copies(nodes: list[Any], sizes: dict[str, Any]) -> set[str]:
    """Names of what is stored as FP8 across the dimension in which what is read is contiguous."""
    read = {_along(dep, sizes) for dep in _reads(nodes, sizes)}
    writes = [dep for node in nodes for dep in node.read_writes.writes if isinstance(dep, MemoryDep)]
    return {dep.name for dep in writes if V.graph.get_dtype(dep.name) in COPIES and {_along(dep, sizes)} != read}


def _is_of_rows(nodes: list[Any], sizes: dict[str, Any]) -> bool:
    """Whether it reads one tensor and several values for each row, or for each column; what it makes itself is none."""
    made = {dep.name for node in nodes for dep in node.read_writes.writes}
    lengths = [size for dimension, size in sizes.items() if dimension in ("x", "y")]
    equal = V.graph.sizevars.statically_known_equals
    names = {dep.name for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)} - made
    values = sum(any(equal(V.graph.get_numel(name), length) for length in lengths) for name in names)
    tensors = _slices([dep for dep in _reads(nodes, sizes) if dep.name not in made])
    return len(tensors) == 1 and values >= VALUES_A_ROW


def _along(dep: MemoryDep, sizes: dict[str, Any]) -> str:
    """The dimension of a 2D kernel, whose nodes iterate over y and then over x, in which a tensor is contiguous."""
    start = dict.fromkeys(dep.var_names, 0)
    first = dep.index.subs(start)
    unit = [place for place, name in enumerate(dep.var_names) if dep.index.subs({**start, name: 1}) - first == 1]
    inside = unit and V.graph.sizevars.statically_known_leq(sympy_product(dep.size[: unit[-1] + 1]), sizes["y"])
    return "y" if inside else "x"


def _reads(nodes: list[Any], tiling: dict[str, Any]) -> list[MemoryDep]:
    """The reads of whole tensors."""
    whole = sympy_product(size for dimension, size in tiling.items() if dimension in ("x", "y"))
    deps = [dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
    reads = [dep for dep in deps if dep.get_numel() == whole]  # and not weights of a norm
    smaller = V.graph.sizevars.statically_known_lt  # by rows of zeros (passes/post_grad/padded_rows.py) it may be
    return [dep for dep in reads if not smaller(2 * V.graph.get_numel(dep.name), whole)]  # nor scales of square blocks


def _slices(reads: list[MemoryDep]) -> set[tuple[str, Any]]:
    """Two slices of one buffer are two; the same slice read in either order of the loops is one."""
    return {(dep.name, dep.index.subs(dict.fromkeys(dep.var_names, 0))) for dep in reads}
