"""The kernel of grouped FP8 GEMMs on Hopper, for `grouped_mm` and `grouped_wgrad`: one warp loads, two warp groups
multiply (Gluon).

A program takes tiles of 128 rows and BLOCK_N columns in turn, through all groups. Its three partitions find their tiles
each by itself, from sizes of groups that only the device knows. The loading warp runs ahead into the next tile while
the two warp groups, of 64 rows each, store theirs.

The tensor core keeps some 14 bits of a sum (docs/numerics.md, "The three GEMMs"). Where that is too few, and where
scales change along K, the product of 128 columns of K begins at zero, and is added in fp32, times its scales, to a sum
in other registers. There is room for such a product of 128 columns of the result, so that a tile of 256 takes two, one
after the other. While one warp group adds, the other multiplies: only the copies make them wait for each other.

A tile may reach beyond its group's rows, or its expert's columns, into the next group or expert. No row or column takes
part in the results of another, so that what is read there, NaN included, ends in results that are not stored. Beyond
the last row of an operand, and beyond K, a copy reads zeros."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from te_inductor.kernels import grouped_mm
from te_inductor.templates.triton.nvfp4_groups import barriers, copy

BLOCK_M = gl.constexpr(grouped_mm.BLOCK_M)  # rows of a tile
GROUP = gl.constexpr(64)  # rows of a warp group
# Columns of a stage: those that share a scale, and those that are added up imprecisely.
BLOCK_K = gl.constexpr(grouped_mm.BLOCK_K)
HALF = gl.constexpr(128)  # columns of the result that are stored at a time, and that share a scale
REGISTERS = gl.constexpr(240)  # a thread of a warp group
LOADER_REGISTERS = gl.constexpr(24)
START_REGISTERS = 168  # as the kernel starts: a third of what both and the loader, which takes as much room, have


@gluon.constexpr_function
def _product(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def _stored(wide, count):
    """The layout of results that are stored: a thread has `wide` of a row side by side, 16 bytes, and four lanes have
    what is contiguous. fp32 stays as the tensor core leaves it: four lanes store 32 bytes."""
    if wide == 4:
        return _product(count)
    columns = [1 << bit for bit in range(count.bit_length() - 1)]
    inner = wide.bit_length() - 1
    return gl.DistributedLinearLayout(
        [*([0, c] for c in columns[:inner]), *([0, c] for c in columns[inner + 2 :]), [8, 0]],
        [*([0, c] for c in columns[inner : inner + 2]), [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [GROUP.value, count],
    )


@gluon.jit
def _split(y):
    """The left and the right half of columns; registers as they are."""
    WIDE: gl.constexpr = y.shape[1] // 2
    y0, y1 = gl.split(gl.permute(gl.reshape(y, (GROUP, 2, WIDE)), (0, 2, 1)))
    y0 = gl.convert_layout(y0, _product(WIDE), assert_trivial=True)
    return y0, gl.convert_layout(y1, _product(WIDE), assert_trivial=True)


@gluon.jit
def _next(place, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of its filling."""
    place += 1
    around = gl.where(place >= STAGES, 1, 0)
    return place - around * STAGES, phase ^ around


@gluon.jit
def _previous(place, STAGES: gl.constexpr):
    return gl.where(place > 0, place, STAGES) - 1


@gluon.jit
def _bounds(bounds, group, start, sizes, BLOCK_N: gl.constexpr, WGRAD: gl.constexpr):
    """Finds where a group ends, and how many rows and columns of tiles it has. Groups of WGRAD are columns of both
    operands. Others are rows of a, and the rows behind the last group are one more, number E."""
    E, M, N = sizes
    across = (N + BLOCK_N - 1) // BLOCK_N
    if WGRAD:
        end = gl.load(bounds + group + 1)
        down = (M + BLOCK_M - 1) // BLOCK_M
    else:
        end = gl.load(bounds + gl.minimum(group, E - 1))
        end = gl.minimum(gl.maximum(gl.where(group < E, end, M), start), M)
        down = (end - start + BLOCK_M - 1) // BLOCK_M
    return end, down, across


@gluon.jit
def _steps(start, end, group, E, K, WGRAD: gl.constexpr):
    """How many stages a tile of a group takes."""
    if WGRAD:
        return (end - start) // BLOCK_K
    else:
        return gl.where(group < E, (K + BLOCK_K - 1) // BLOCK_K, 0)


@gluon.jit
def _place_of(tile, down, across, BAND: gl.constexpr):
    """The row and the column of a tile of a group: bands of BAND rows of tiles, from top to bottom in each."""
    band = tile // (BAND * across)
    rest = tile - band * BAND * across
    high = gl.minimum(down - band * BAND, BAND)
    column = rest // high
    return band * BAND + rest - column * high, column


@gluon.jit
def _load_all(
    a, b, b_scales, bounds, memory, sizes, K, first, programs,
    STAGES: gl.constexpr, BAND: gl.constexpr, WGRAD: gl.constexpr,
):  # fmt: skip
    """The loading warp: everything that the two warp groups multiply, as far ahead as there is room."""
    at_a, at_b, at_scales, full, empty = memory
    E, N = sizes[0], sizes[2]
    BLOCK_N: gl.constexpr = at_b.shape[1]
    place, phase, tile, before, start = 0, 0, first, 0, 0
    if WGRAD:
        start = gl.load(bounds)
    for group in range(E):
        end, down, across = _bounds(bounds, group, start, sizes, BLOCK_N, WGRAD)
        steps = _steps(start, end, group, E, K, WGRAD)
        behind = before + down * across
        while tile < behind:
            row, column = _place_of(tile - before, down, across, BAND)
            m, n, k = row * BLOCK_M, column * BLOCK_N, 0
            if WGRAD:
                k = start
            else:
                m += start
                n += group * N
            for step in range(steps):
                mbarrier.wait(empty.index(place), phase ^ 1)
                if b_scales is not None:
                    SCALES: gl.constexpr = BLOCK_N // HALF
                    mbarrier.expect(full.index(place), (BLOCK_M + BLOCK_N) * BLOCK_K + SCALES * HALF * 4)
                    for half in gl.static_range(SCALES):
                        into = at_scales.index(place * SCALES + half)
                        copy(b_scales, [k // BLOCK_K + step, n + half * HALF], full.index(place), into)
                else:
                    mbarrier.expect(full.index(place), (BLOCK_M + BLOCK_N) * BLOCK_K)
                copy(a, [m, k + step * BLOCK_K], full.index(place), at_a.index(place))
                copy(b, [n, k + step * BLOCK_K], full.index(place), at_b.index(place))
                place, phase = _next(place, phase, STAGES)
            tile += programs
        before = behind
        start = end


@gluon.jit
def _summed(memory, steps, place, phase, WHO: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """A tile's products, summed by the tensor core; those of one stage are under way while the next one comes."""
    at_a, at_b, _, full, empty = memory
    y = warpgroup_mma_init(gl.zeros((GROUP, BLOCK_N), gl.float32, layout=_product(BLOCK_N)))
    for step in range(steps):
        mbarrier.wait(full.index(place), phase)
        left = at_a.index(place).slice(WHO * GROUP, GROUP)
        y = warpgroup_mma(left, at_b.index(place).permute((1, 0)), y, is_async=True)
        y = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[y]))
        # Computed, and not carried from turn to turn: ``last = place`` before and in a loop is no change to Triton
        # (3.6, 3.7), which would release the first stage again and again.
        mbarrier.arrive(empty.index(_previous(place, STAGES)), pred=step > 0)
        place, phase = _next(place, phase, STAGES)
    y = warpgroup_mma_wait(0, deps=[y])
    mbarrier.arrive(empty.index(_previous(place, STAGES)), pred=steps > 0)
    if BLOCK_N == HALF:
        return (y,), place, phase
    else:
        return _split(y), place, phase


@gluon.jit
def _added(y, half: gl.constexpr, memory, place, scales, factor, WHO: gl.constexpr, BLOCKED: gl.constexpr):
    """A stage's product with 128 rows of b, added to y; scales are of rows of a, the factor is of the rows of b."""
    at_a, at_b, at_scales, _, _ = memory
    HALVES: gl.constexpr = at_b.shape[1] // HALF
    left = at_a.index(place).slice(WHO * GROUP, GROUP)
    right = at_b.index(place).slice(half * HALF, HALF)
    zeros = gl.zeros((GROUP, HALF), gl.float32, layout=_product(HALF))
    part = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if BLOCKED == 0:
        return y + part
    else:
        if BLOCKED == 1:
            part *= at_scales.index(place * HALVES + half).load(_product(HALF))
        if BLOCKED == 2:
            part *= factor  # apart from the scales: ptxas runs out of registers otherwise
        return y + part * gl.expand_dims(scales, 1)


@gluon.jit
def _scales(of_a, of_b, step, BLOCKED: gl.constexpr):
    """The scales of a stage: those of rows of a, and of square blocks of b; 1.0 where there are none."""
    factor0, factor1, scales = 1.0, 1.0, 1.0
    if BLOCKED != 0:
        start, stride, below, most = of_a
        scales = gl.load(start + step * stride + below, mask=below < most, other=0.0)
    if BLOCKED == 2:
        start, stride = of_b
        factor0 = gl.load(start + step)
        factor1 = gl.load(start + stride + step)
    return scales, factor0, factor1


@gluon.jit
def _promoted(
    memory, of_a, of_b, steps, place, phase,
    WHO: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCKED: gl.constexpr,
):  # fmt: skip
    """A tile's products, a stage's at a time, summed in fp32; times scales of blocks, where they are BLOCKED."""
    full, empty = memory[3], memory[4]
    HALVES: gl.constexpr = BLOCK_N // HALF
    y0 = gl.zeros((GROUP, HALF), gl.float32, layout=_product(HALF))
    y1 = y0
    scales, factor0, factor1 = _scales(of_a, of_b, 0, BLOCKED)
    for step in range(steps):
        mbarrier.wait(full.index(place), phase)
        following = _scales(of_a, of_b, gl.minimum(step + 1, steps - 1), BLOCKED)
        y0 = _added(y0, 0, memory, place, scales, factor0, WHO, BLOCKED)
        if HALVES == 2:
            y1 = _added(y1, 1, memory, place, scales, factor1, WHO, BLOCKED)
        mbarrier.arrive(empty.index(place))
        place, phase = _next(place, phase, STAGES)
        scales, factor0, factor1 = following
    if HALVES == 2:
        return (y0, y1), place, phase
    else:
        return (y0,), place, phase


@gluon.jit
def _store(y, n, result, OF_A: gl.constexpr, OF_B: gl.constexpr, ADD: gl.constexpr):
    """Store 64 rows and up to 128 columns, as far as they are the group's and the expert's; `row` is the output's.
    Where nothing was multiplied (not `live`), zeros, whatever the scales are."""
    out, bias, a_scale, b_scale, group, row, rows, N, live = result
    PRODUCT: gl.constexpr = y.type.layout
    COLUMNS: gl.constexpr = y.shape[1]
    WIDE: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    STORED: gl.constexpr = _stored(WIDE, COLUMNS)
    column = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
    if OF_A == 0:
        y *= gl.load(a_scale, mask=live, other=0.0)
    if OF_A == 1:
        below = gl.arange(0, GROUP, layout=gl.SliceLayout(1, PRODUCT))
        y *= gl.expand_dims(gl.load(a_scale + below, mask=(below < rows) & live, other=0.0), 1)
    if OF_B == 0:
        y *= gl.load(b_scale, mask=live, other=0.0)
    if OF_B == 1:
        y *= gl.expand_dims(gl.load(b_scale + column, mask=(column < N) & live, other=0.0), 0)
    if bias is not None:
        of_group = bias + group.to(gl.int64) * N
        y += gl.expand_dims(gl.load(of_group + column, mask=(column < N) & live, other=0.0), 0).to(gl.float32)
    y = gl.convert_layout(y.to(out.dtype.element_ty), STORED)
    below = gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(1, STORED)), 1)
    column = n + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORED)), 0)
    place = out + row.to(gl.int64) * N + (below * N + column)
    inside = (below < rows) & (column < N)
    if ADD:
        y += gl.load(place, mask=inside, other=0.0)
    gl.store(place, y, mask=inside)


@gluon.jit
def _multiply_all(
    a_scale, b_scale, bias, out, bounds, memory, sizes, K, first, programs,
    WHO: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, WGRAD: gl.constexpr, FAST: gl.constexpr,
    OF_A: gl.constexpr, OF_B: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 rows of each tile."""
    E, M, N = sizes
    BLOCK_N: gl.constexpr = memory[1].shape[1]
    BLOCKED: gl.constexpr = 0 if OF_A != 2 else 1 if WGRAD else 2
    place, phase, tile, before, start = 0, 0, first, 0, 0
    groups = E
    if WGRAD:
        start = gl.load(bounds)
    else:
        groups += 1
    below = gl.arange(0, GROUP, layout=gl.SliceLayout(1, _product(HALF)))
    blocks = (K + BLOCK_K - 1) // BLOCK_K
    most = ((N + HALF - 1) // HALF - 1) * blocks
    for group in range(groups):
        end, down, across = _bounds(bounds, group, start, sizes, BLOCK_N, WGRAD)
        steps = _steps(start, end, group, E, K, WGRAD)
        behind = before + down * across
        while tile < behind:
            row, column = _place_of(tile - before, down, across, BAND)
            m, n = row * BLOCK_M + WHO * GROUP, column * BLOCK_N
            if WGRAD:
                rows = M - m
                to = group * M + m
                of_group = group
            else:
                m += start
                rows = end - m
                to = m
                of_group = gl.minimum(group, E - 1)
            if FAST:
                ys, place, phase = _summed(memory, steps, place, phase, WHO, BLOCK_N, STAGES)
            else:
                # Rows and blocks that there are, also where there is nothing to multiply.
                of_a = a_scale + m, M, below, M - m
                of_b = b_scale, 0
                if BLOCKED == 1:
                    block = gl.minimum(start // BLOCK_K, blocks - 1)
                    of_a = a_scale + block.to(gl.int64) * M + m, M, below, M - m
                if BLOCKED == 2:
                    at = n // HALF * blocks
                    of_b = b_scale + of_group * (most + blocks) + at, gl.minimum(blocks, most - at)
                ys, place, phase = _promoted(memory, of_a, of_b, steps, place, phase, WHO, BLOCK_N, STAGES, BLOCKED)
            scale_a, scale_b = a_scale, b_scale
            if OF_A == 1:
                scale_a += to
            if OF_B == 1:
                scale_b += of_group * N
            elif not WGRAD:
                scale_b += of_group
            result = out, bias, scale_a, scale_b, of_group, to, rows, N, steps > 0
            for half in gl.static_range(len(ys)):
                if out.dtype.element_ty == gl.float32:  # by 64 columns: there are no registers for all
                    for part in gl.static_range(2):
                        _store(_split(ys[half])[part], n + half * HALF + part * (HALF // 2), result, OF_A, OF_B, ADD)
                else:
                    _store(ys[half], n + half * HALF, result, OF_A, OF_B, ADD)
            tile += programs
        before = behind
        start = end


@gluon.jit(do_not_specialize=["E", "M", "programs"])
def grouped(
    a,  # (M, K), a descriptor of it
    a_scale,  # one, of rows, or of blocks (K/128, M)
    b,  # (E N, K), a descriptor; of WGRAD (N, K)
    b_scale,  # one of a group, of rows of a group, or of square blocks of a group (E, N/128, K/128)
    b_scales,  # of blocks of rows (K/128, N), a descriptor, or None
    bias,  # (E, N), or None
    out,  # (M, N); of WGRAD (E, M, N)
    bounds,  # (E,), the rows that groups end at; of WGRAD (E + 1,), the columns of K that they begin and end at
    E,
    M,
    N,
    K,
    programs,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,  # tiles below each other that are taken before those beside them: they share what L2 holds
    WGRAD: gl.constexpr,  # whether groups lie along K
    FAST: gl.constexpr,  # whether the tensor core sums all of K
    OF_A: gl.constexpr,  # scales of a: 0 of all of it, 1 of rows, 2 of blocks
    OF_B: gl.constexpr,
    ADD: gl.constexpr,  # whether to add to what is in the output
):
    SCALES: gl.constexpr = BLOCK_N // HALF
    at_a = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    at_b = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    if b_scales is not None:
        at_scales = gl.allocate_shared_memory(gl.float32, [STAGES * SCALES, 1, HALF], b_scales.layout)
    else:
        at_scales = at_a
    full, empty = barriers(STAGES, 2)
    memory = at_a, at_b, at_scales, full, empty
    sizes = E, M, N
    first = gl.program_id(0)
    gl.warp_specialize(
        [
            (_multiply_all, (
                a_scale, b_scale, bias, out, bounds, memory, sizes, K, first, programs,
                0, STAGES, BAND, WGRAD, FAST, OF_A, OF_B, ADD,
            )),
            (_multiply_all, (
                a_scale, b_scale, bias, out, bounds, memory, sizes, K, first, programs,
                1, STAGES, BAND, WGRAD, FAST, OF_A, OF_B, ADD,
            )),
            (_load_all, (a, b, b_scales, bounds, memory, sizes, K, first, programs, STAGES, BAND, WGRAD)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
