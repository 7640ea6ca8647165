"""Casts alone, by scales of tensors, rows and blocks."""

from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import ops
from tests.offline.cases.common import Case, cast_both_ways


def amax_of_swiglu() -> Case:
    """The amax at Llama-3.2-1B's width, which Inductor would cut into uneven parts."""
    from te_inductor.recipes import Quantizer

    def scale(h: Tensor) -> Any:
        gate, up = h.chunk(2, 1)
        return ops.current_scale([nn.functional.silu(gate) * up], Quantizer("e4m3"))

    h = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    return torch.compile(scale, backend="te", fullgraph=True), (h,)


def two_way_cast() -> Case:
    """Nothing in front; a size that fills no tile."""
    return cast_both_ways(80, 144)


def two_way_cast_padded() -> Case:
    """Both copies need padding."""
    return cast_both_ways(70, 137)


def two_way_cast_rowwise() -> Case:
    return cast_both_ways(80, 144, scope="row")


def two_way_cast_rowwise_padded() -> Case:
    return cast_both_ways(70, 137, scope="row")


def long_rows() -> Case:
    """Rows as few as a step of generation has, longer than Inductor would leave whole."""
    from te_inductor.recipes import Quantizer

    quantizer = Quantizer("e4m3", power_2_scale=True, scope="row")
    x = torch.randn(2, 9728, device="cuda", dtype=torch.bfloat16)
    return torch.compile(lambda x: ops.quantize(x, quantizer), backend="te", fullgraph=True), (x,)


def _pieces(scope: str, dim: int, size: int = 128) -> Case:
    """Three matrices side by side, each computed into its place; as merged layers cast their weights and gradients."""
    from te_inductor.recipes import Quantizer

    def function(*pieces: Tensor) -> Any:
        return ops.quantize_pieces([piece.abs() for piece in pieces], dim, Quantizer("e4m3", scope=scope))

    sizes = [[size, size] for _ in range(3)]
    sizes[1][dim] *= 2
    pieces = tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return torch.compile(function, backend="te", fullgraph=True), pieces


def pieces_of_rows() -> Case:
    """Pieces beside each other, so that they share the scales of their rows, and not those of their columns."""
    return _pieces("row", 1, 48)


def pieces_of_blocks() -> Case:
    return _pieces("1x128", 1)


def pieces_of_squares() -> Case:
    """Pieces below each other, as weights."""
    return _pieces("128x128", 0)


def _recording_cast(rows: int, columns: int) -> Case:
    """Delayed scaling: both copies and the amax from one read, the scale given."""
    from te_inductor.recipes import Quantizer

    def function(amax: Tensor, x: Tensor, scale: Tensor) -> Any:
        ops.record_amax([x], amax)
        return *ops.quantize_rowcol_delayed(x, scale, Quantizer("e4m3")), amax + 0.0

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(function, backend="te", fullgraph=True), (amax, x, scale)


def recording_cast() -> Case:
    return _recording_cast(80, 144)


def recording_cast_padded() -> Case:
    return _recording_cast(70, 137)


def rows_that_record(rows: int = 40, columns: int = 1104, **options: Any) -> Case:
    """A cast as a norm's is under delayed scaling, but with a statistic that is exact: the row copy and the amax of
    what depends on the whole row. A row that does not fill its program."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor, amax: Tensor, scale: Tensor) -> Any:
        wide = x.float()
        centred = wide - wide.amax(1, keepdim=True)
        ops.record_amax([centred], amax)
        return ops.quantize_rowcol_delayed(centred, scale, Quantizer("e4m3"))[0], amax + 0.0

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(function, backend="te", fullgraph=True, options=options), (x, amax, scale)


def long_rows_that_record() -> Case:
    """Longer than a program holds; few, as the interpreter runs them, which Inductor would have several programs
    share."""
    return rows_that_record(3, 16400, split_reductions=False)


def _cast_of_three(transposed: bool) -> Case:
    """Three tensors are read, so that one copy is stored in pairs of rows; a size that fills no tile."""
    from te_inductor.recipes import Quantizer

    def function(y: Tensor, z: Tensor, x: Tensor, scale: Tensor) -> Any:
        chosen = torch.where(y > z, x, x.abs())
        return ops.quantize_rowcol_delayed(chosen.t() if transposed else chosen, scale, Quantizer("e4m3"))

    x, y, z = (torch.randn(80, 144, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return torch.compile(function, backend="te", fullgraph=True), (y, z, x, torch.ones((), device="cuda"))


def cast_of_three() -> Case:
    return _cast_of_three(transposed=False)


def cast_of_three_transposed() -> Case:
    """The row copy is in pairs."""
    return _cast_of_three(transposed=True)


def two_way_cast_block() -> Case:
    """Whole blocks, the tiles of one kernel."""
    return cast_both_ways(256, 384, scope="1x128")


def two_way_cast_block_long() -> Case:
    """Casts so many rows that Inductor would give them two axes of a grid."""
    return cast_both_ways(2**17, 128, scope="1x128")


def two_way_cast_block_padded() -> Case:
    """Blocks that are cut off, two of them in a row."""
    return cast_both_ways(20, 137, scope="1x128")


def two_way_cast_squares() -> Case:
    return cast_both_ways(256, 384, scope="128x128")


def two_way_cast_squares_padded() -> Case:
    return cast_both_ways(137, 70, scope="128x128")


def two_way_cast_block_of_heads() -> Case:
    """A matrix that is a view of what is computed, as attention's output is, of (batch, heads, sequence, 128). Scales
    are powers of two."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        matrix = x.abs().transpose(1, 2).reshape(256, 384)
        return ops.quantize_rowcol(matrix, Quantizer("e4m3", power_2_scale=True, scope="1x128"))

    x = torch.randn(4, 3, 64, 128, device="cuda", dtype=torch.bfloat16)
    return torch.compile(function, backend="te", fullgraph=True), (x,)


def _rows_of_blocks(rows: int, op: str = "quantize_rowcol", of_another: bool = False) -> Case:
    """A cast as a norm's row copy is, but with a statistic that is exact. Rows that do not fill their programs."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor, y: Tensor) -> Any:
        wide, other = x.float(), y.float()
        centred = wide - (other if of_another else wide).amax(1, keepdim=True)
        return getattr(ops, op)(centred, Quantizer("e4m3", scope="1x128"))[:2]

    x, y = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (1280, 384))
    return torch.compile(function, backend="te", fullgraph=True), (x, y)


def rows_of_blocks() -> Case:
    return _rows_of_blocks(128)


def rows_of_blocks_inference() -> Case:
    """Any number of rows."""
    return _rows_of_blocks(5, "quantize")


def rows_of_blocks_dynamic() -> Case:
    run, (x, y) = rows_of_blocks_inference()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    return run, (x, y)


def rows_of_blocks_of_another() -> Case:
    """What reduces another tensor holds no rows of this one."""
    return _rows_of_blocks(200, "quantize", of_another=True)


def rows_of_blocks_beside_a_sum() -> Case:
    """A cast of what a norm reads."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        made = x.abs()
        return made.float().square().mean(1, keepdim=True), *ops.quantize(made, Quantizer("e4m3", scope="1x128"))

    return torch.compile(function, backend="te", fullgraph=True), (
        torch.randn(128, 1280, device="cuda", dtype=torch.bfloat16),
    )


def columns_of_blocks() -> Case:
    """Casts as the backward does what the forward computed: tiles that are blocks in one dimension."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        _, _, data, scale_inv = ops.quantize_rowcol(x.abs() + 0.0, Quantizer("e4m3", scope="1x128"))
        return data, scale_inv

    return torch.compile(function, backend="te", fullgraph=True), (
        torch.randn(256, 384, device="cuda", dtype=torch.bfloat16),
    )


def row_cast_squares() -> Case:
    """Casts as of a weight, in inference: whole blocks, one read."""
    from te_inductor.recipes import Quantizer

    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    return torch.compile(lambda x: ops.quantize(x, Quantizer("e4m3", scope="128x128")), backend="te", fullgraph=True), (
        x,
    )


def columnwise_cast_block() -> Case:
    """The transposed copy alone, as of dy where only the weight wants a gradient; two blocks in its rows."""
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        return ops.quantize(x.t(), Quantizer("e4m3", scope="1x128"))

    return torch.compile(function, backend="te", fullgraph=True), (
        torch.randn(130, 20, device="cuda", dtype=torch.bfloat16),
    )
