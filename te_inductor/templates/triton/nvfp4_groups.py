"""What the kernels share whose warp groups make of 64 rows of a stored NVFP4 weight the left operand of wgmma, in
registers, while one warp loads (Gluon, Hopper); and indices along one dimension of a tensor, whose layout says which bit
of which dimension each bit of a register's and a lane's number is. Kept apart, what a lane adds to an address is
computed and what a register adds is a constant.

Four lanes of a warp share a row of the weight: each holds two neighbouring blocks of each half of 256 columns. Of 16
rows a lane holds two, which are neighbours, so that it stores two of y side by side; in a product they are eight apart.
Eight lanes that read at once read from all banks: the first of the bits that say which row is 4."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from te_inductor.kernels import nvfp4_linear


@gluon.constexpr_function
def of_dimension(layout, dim):  # type: ignore[no-untyped-def]
    """The layout of a tensor that has only this dimension. (Triton hashes annotations too, and on Python 3.10 not
    `Any`.)"""
    for other in range(layout.rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def index(dim: gl.constexpr, layout: gl.constexpr):
    """The index along one dimension of a linear layout, broadcast to the others."""
    RANK: gl.constexpr = layout.rank
    found = gl.arange(0, layout.shape[dim], layout=of_dimension(layout, dim))
    for other in gl.static_range(RANK):
        if other != dim:
            found = gl.expand_dims(found, other)
    return found


# Triton 3.9 gave it another name.
copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

GROUP = gl.constexpr(nvfp4_linear.GROUP)  # rows of the weight of a warp group
BLOCK_K = gl.constexpr(nvfp4_linear.BLOCK_K)  # columns of the weight in a stage, and in a turn of the loop
HALF_K = gl.constexpr(128)  # columns of a product's operand
_ROWS = [4, 2, 8]  # of 16 of the weight, by the bits of a lane


def layout(wide: int, registers: list[list[int]], columns: int) -> Any:
    """The layout of (64, columns) elements of a stage, `wide` of which side by side are two blocks'."""
    lanes = [[0, wide], [0, 2 * wide], *([bit, 0] for bit in _ROWS)]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [GROUP.value, columns])


UNITS = layout(4, [[0, 1], [0, 2], [1, 0], [0, 16]], BLOCK_K.value // 8)  # 32 bits each, eight values


@gluon.constexpr_function
def stored(rows):
    """A product as it is stored: two columns of y, eights of rows, two rows, row, column."""
    eights = [[0, 1 << bit, 0, 0, 0] for bit in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0], *eights],
        [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *([bit // 2, 0, 0, 0, 0] for bit in _ROWS)],
        [[8, 0, 0, 0, 0], [16, 0, 0, 0, 0]],
        [],
        [GROUP.value // 2, rows // 8, 4, 2, 2],
    )


@gluon.jit
def barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Makes two barriers a stage: one says that it is full, the other that its readers have done with it."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(COUNT):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def to_stored(y):
    """A product (64, rows) in the order of `stored`: registers as they are."""
    ROWS: gl.constexpr = y.shape[1]
    y = gl.reshape(y, (4, 2, 2, 2, 2, ROWS // 8, 4, 2))
    y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 5, 6, 7, 1)), (GROUP // 2, ROWS // 8, 4, 2, 2))
    return gl.convert_layout(y, stored(ROWS), assert_trivial=True)


@gluon.jit
def store(y, out, m, n, split, M, N, EDGES: gl.constexpr):
    """Stores in the order of `stored`, for rows from m and columns from n on, beyond which y may end where there are
    EDGES. What a lane adds to an address and what a register does are kept apart: the second is a constant of a
    store."""
    STORED: gl.constexpr = y.type.layout
    lane = index(0, STORED) * 2 + index(2, STORED) * (2 * N)
    register = index(1, STORED) * (8 * N) + index(3, STORED) * N + index(4, STORED)
    inside = m + index(2, STORED) * 2 + (index(1, STORED) * 8 + index(3, STORED)) < M
    if EDGES:
        inside = inside & (n + index(0, STORED) * 2 + index(4, STORED) < N)
    out += (split * M + m).to(gl.int64) * N + n
    gl.store(out + lane + register, y.to(out.dtype.element_ty), mask=inside)
