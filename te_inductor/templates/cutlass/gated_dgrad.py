"""A GEMM for Hopper with scales of blocks whose epilogue is a gated activation's backward, and both casts of what that
makes. Read by `build.py`'s process alone.

Of ``h = act(gate) * up`` a GEMM, down's dgrad, makes dh, of which two kernels would make dgate and dup, each both
copies: of an element of h dh is written and read twice, gate read twice and up once, 16 bytes with the copies. A tile
of this GEMM is two blocks of 128 x 128, one a warp group's, so that the amax of a block's row and of its column is
found where the sums are. Gate and up come through the stages of operands, behind the last block of K, both copies leave
by the copy engine, and dh is never in memory: 8 bytes.

# Note [Neighbours in a register]
A thread has two rows of 16, 8 apart, and two columns of each 8 of what a warp multiplies. Shared memory is written in
units of 16 bits: two columns of a row copy, two rows of a column copy. So rows and columns are numbered otherwise for
the tensor core: its rows r and r + 8 of 16 are rows 2 r and 2 r + 1 of the tensor, and what a thread has of 16 columns
are four that are neighbours. The copy engine brings operands in that order, as tensors of more dimensions. Then four
casts are a word of either copy, and `stmatrix` writes words, those of the column copy transposed; nothing moves between
threads."""

# mypy: ignore-errors

import struct

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from quack.compile_utils import make_fake_stream, make_fake_tensor

from te_inductor.kernels.cutlass_tiles import ALIGNED, Kernel
from te_inductor.numerics.activation import values_of
from te_inductor.recipes.formats import ELEMENTS
from te_inductor.templates.cutlass import packing
from te_inductor.templates.cutlass.block_scaled import DTYPES, PIECES, STORE, BlockScaledGemm
from te_inductor.templates.cutlass.pipeline import (
    BLOCK,
    GROUP,
    HALF,
    STAGES,
    STORED,
    TILE_M,
    TILE_N,
    WARP,
    Tiles,
    loader,
    next_stage,
    storage_type,
    storer,
    swizzled,
    tensors_of,
    wait,
)
from te_inductor.templates.cutlass.scalar_math import STEPS

SIXTEEN = TILE_N // 16  # of the columns of a tile
PIECE = 2 * STORED * HALF  # bytes of a piece of gate or up; of one of a copy, HALF x BLOCK, as many
MANTISSA, BIAS = 23, 127  # of fp32
NAN = 0x7FC00000
UPPER = -1 << 16  # the bits of a word's upper half


def compiled(kernel: Kernel):
    """The compiled launch: ``(a, b, gate, up, data, data_t, scale_inv, scale_inv_t, a_scale, b_scale, clusters,
    swizzle)`` as `GatedGradientGemm` has them."""
    [element] = [element for element in ELEMENTS.values() if str(element.dtype) == f"torch.{kernel.out}"]
    a, b, out = (DTYPES[name] for name in (kernel.a, kernel.b, kernel.out))
    m, n, k, wide, blocks, columns, down, across = (cute.sym_int() for _ in range(8))
    return cute.compile(
        GatedGradientGemm(*kernel.gating, element, kernel.cluster_m, kernel.cluster_n),
        make_fake_tensor(a, (m, k), divisibility=ALIGNED),
        make_fake_tensor(b, (n, k), divisibility=ALIGNED),
        make_fake_tensor(BFloat16, (m, n), divisibility=8),
        make_fake_tensor(BFloat16, (m, n), divisibility=8),
        make_fake_tensor(out, (m, wide), divisibility=ALIGNED),
        make_fake_tensor(out, (wide, m), divisibility=ALIGNED),
        make_fake_tensor(Float32, (across, m)),
        make_fake_tensor(Float32, (down, wide)),
        make_fake_tensor(Float32, (blocks, m)),
        make_fake_tensor(Float32, (blocks, columns), leading_dim=0),
        Int32(1),
        Int32(1),
        make_fake_stream(),
        options="--enable-tvm-ffi",
    )


class GatedGradientGemm(BlockScaledGemm):
    """``d = sum over blocks k of (a_scale[k, M] * b_scale[k, N/128]) * (a[M, k] @ b[N, k].T)``, and of the two results
    of ``gating(d, gate, up)``, rounded to bf16, side by side, both copies with scales of 1 x 128 that are powers of
    two. Clusters divide M and N."""

    rows_apart = (1, 2)

    def __init__(self, steps, results, element, cluster_m: int, cluster_n: int) -> None:
        super().__init__(True, cluster_m, cluster_n, behind=4)
        self.steps, self.results, self.element = steps, results, element
        [self.largest] = struct.unpack("<i", struct.pack("<f", element.max))  # its bits

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (N, K)
        gate: cute.Tensor,  # (M, N) bf16
        up: cute.Tensor,  # (M, N) bf16
        data: cute.Tensor,  # (M, 2 N)
        data_t: cute.Tensor,  # (2 N, M)
        scale_inv: cute.Tensor,  # (2 N/128, M)
        scale_inv_t: cute.Tensor,  # (M/128, 2 N)
        a_scale: cute.Tensor,  # (K/128, M)
        b_scale: cute.Tensor,  # (K/128, N/128)
        clusters: Int32,  # at work at a time
        swizzle: Int32,  # rows of clusters that follow each other
        stream,
    ):
        mma, a_layout, b_layout, loads = self._operands(_in_pairs(a), _in_fours(b))
        piece_layout = swizzled(gate.element_type, (HALF, STORED), PIECES * STAGES)
        out_layout = swizzled(data.element_type, (HALF, BLOCK), 2)
        load_gate, gate_tma = loader(gate, piece_layout, (HALF, STORED), 1)
        load_up, up_tma = loader(up, piece_layout, (HALF, STORED), 1)
        store, data_tma = storer(data, out_layout, (HALF, BLOCK))
        store_t, data_t_tma = storer(data_t, out_layout, (HALF, BLOCK))

        # What each warp group has, of dgate and of dup: the amaxes of columns that each warp has found, in pairs;
        # scales.
        own = {
            "largest": cute.struct.Align[cute.struct.MemRange[Int32, 2 * 4 * 2 * TILE_N // 2], 128],
            "scales": cute.struct.Align[cute.struct.MemRange[Float32, 2 * 2 * TILE_N], 128],
        }
        self.storage = storage_type(own, {"s_a": (a, a_layout), "s_b": (b, b_layout), "s_out": (data, out_layout)})
        tensors = (*loads, load_gate, gate_tma, load_up, up_tma, store, data_tma, store_t, data_t_tma)
        scales = (scale_inv, scale_inv_t, a_scale, b_scale)
        self.kernel(mma, *tensors, *scales, a_layout, b_layout, piece_layout, out_layout, swizzle).launch(
            **self._launched(clusters), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        a: cute.Tensor,
        load_b: cute.CopyAtom,
        b: cute.Tensor,
        load_gate: cute.CopyAtom,
        gate: cute.Tensor,
        load_up: cute.CopyAtom,
        up: cute.Tensor,
        store: cute.CopyAtom,
        data: cute.Tensor,
        store_t: cute.CopyAtom,
        data_t: cute.Tensor,
        scale_inv: cute.Tensor,
        scale_inv_t: cute.Tensor,
        a_scale: cute.Tensor,
        b_scale: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        piece_layout: cute.ComposedLayout,
        out_layout: cute.ComposedLayout,
        swizzle: Int32,
    ):
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        begun = self._begin(storage)
        s_a, s_b, s_out, rows, columns = tensors_of(storage, a_layout, b_layout, out_layout)
        # In the place of a.
        s_behind = storage.s_a.get_tensor(piece_layout.outer, swizzle=piece_layout.inner, dtype=BFloat16)
        addresses = [part.data_ptr().toint() for part in (storage.s_a, storage.s_out, storage.largest, storage.scales)]
        finish = (store, data, store_t, data_t, s_out, scale_inv, scale_inv_t, gate.shape[1] // TILE_N, addresses)
        self._work(
            *begun, mma, (load_a, a, s_a, load_b, b, s_b), ((load_gate, gate), (load_up, up)), s_behind, (a_scale, rows),
            (b_scale, columns), finish, Tiles.of(self.cluster, gate.shape, swizzle), cute.ceil_div(a.shape[1], BLOCK),
        )  # fmt: skip

    @cute.jit
    def _finish(self, mma, sums, full, empty, finish, group, thread, m, n, stage, phase):
        store, data, store_t, data_t, s_out, scale_inv, scale_inv_t, across, addresses = finish
        pieces, staged, largest, scales = addresses
        lane, of_warp = thread % WARP, thread // WARP
        row, place = lane // 4, lane % 4
        kept, of_rows, of_columns = {}, {}, {}
        for half in cutlass.range_constexpr(2):
            after, phase_after = next_stage(stage, phase)
            wait(full + stage, phase)
            wait(full + after, phase_after)
            read = [pieces + at * (TILE_M * BLOCK) + group * (2 * PIECE) for at in (stage, after)]
            self._differentiate(sums[half], half, read, of_warp, row, place, kept, of_rows, of_columns)
            self._release_read(empty + stage, lane)
            self._release_read(empty + after, lane)
            stage, phase = next_stage(after, phase_after)
        # The amaxes of columns, of each warp and then of all four of them.
        to = largest + (group * 4 + of_warp) * (2 * 2 * TILE_N) + place * 8
        for sixteen in cutlass.range_constexpr(SIXTEEN):
            for which in cutlass.range_constexpr(2):
                found = [_over_lanes(of_columns[which, sixteen, b], (4, 8, 16)) for b in range(2)]
                packing.store_words(to + which * (2 * TILE_N) + sixteen * 32, *found, row)
        cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)
        which, two = thread // (TILE_N // 2), thread % (TILE_N // 2)
        read = largest + group * (4 * 2 * 2 * TILE_N) + which * (2 * TILE_N) + two * 4
        top = packing.load_word(read)
        for other in cutlass.range_constexpr(1, 4):
            top = packing.larger(top, packing.load_word(read + other * (2 * 2 * TILE_N)))
        of_two = [self._scale(bits) for bits in (top << 16, top & Int32(UPPER))]
        packing.store_numbers(scales + (group * 2 + which) * (4 * TILE_N) + two * 8, *map(packing.number, of_two))
        column = (which * across + n) * TILE_N + two * 2
        for i in cutlass.range_constexpr(2):
            scale_inv_t[m * 2 + group, column + i] = _inverse(of_two[i])
        # The amaxes of rows, of which each of four lanes has found as much.
        by_row = {}
        first = (m * 2 + group) * BLOCK + of_warp * 16 + row * 2
        for (which, half, high), found in of_rows.items():
            top = _over_lanes(packing.largest(found), (1, 2))
            scale = self._scale(top & Int32(UPPER))
            by_row[which, half, high] = packing.number(scale)
            self._store_scale(scale_inv, which * across + n, first + half * HALF + high, scale, place)
        cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)
        from_s, to_data = _stored_by(store, s_out, data)
        _, to_data_t = _stored_by(store_t, s_out, data_t)
        at = staged + group * PIECE
        for which in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                self._before(group, thread)
                self._write_rows(at, half, which, kept, by_row, of_warp, lane)
                rows = to_data[None, m * 4 + group * 2 + half, which * across + n]
                self._after(group, thread, store, from_s[None, group], rows)
            for side in cutlass.range_constexpr(2):
                self._before(group, thread)
                factors = scales + (group * 2 + which) * (4 * TILE_N) + place * 16
                self._write_columns(at, side, which, kept, factors, of_warp, lane)
                columns = to_data_t[None, (which * across + n) * 2 + side, m * 2 + group]
                self._after(group, thread, store_t, from_s[None, group], columns)
        return stage, phase

    def _differentiate(self, sums, half, read, of_warp, row, place, kept, of_rows, of_columns):
        """Computes, of 64 rows, both results as pairs of bf16, and the largest magnitudes of what has been seen so
        far."""
        for high in range(2):
            # A row is 128 bytes of a piece, whose eights are exchanged by its number, as the copy engine writes them.
            line = of_warp * (16 * 128) + row * 256 + high * 128
            line += ((place // 2) ^ high) * 16 + place % 2 * 8 + row % 4 * 32
            for sixteen in range(SIXTEEN):
                side, inside = divmod(sixteen, SIXTEEN // 2)
                at = [base + side * PIECE + (line ^ (inside * 32)) for base in read]
                gates, ups = ([v for word in packing.load_words(each) for v in packing.both(word)] for each in at)
                made = []
                for column in range(4):
                    at_sum = ((column % 2, high, 2 * sixteen + column // 2), 0, 0)
                    values = values_of(self.steps, (sums[at_sum], gates[column], ups[column]), STEPS)
                    made.append([values[result] for result in self.results])
                for which in range(2):
                    pairs = [packing.pair(made[2 * b][which], made[2 * b + 1][which]) for b in range(2)]
                    kept[which, half, high, sixteen] = pairs
                    sizes = [packing.magnitudes(pair) for pair in pairs]
                    _raise(of_rows, (which, half, high), packing.larger(*sizes))
                    for b in range(2):
                        _raise(of_columns, (which, sixteen, b), sizes[b])

    def _scale(self, amax):
        """The power of two to multiply with, as `arithmetic.encode_scale` finds it in a bf16 tensor; both as
        bits. NaN where the amax is infinite or NaN, so that all of the block is: Note [Overflow stays visible] in
        lowerings/casts/values.py. It has one row, of whose GEMM every result is non-finite anyway, and no register is
        left to look at each value."""
        difference = cutlass.min(Int32(self.largest) - amax, Int32(BIAS << MANTISSA))
        raised = (difference + Int32(BIAS << MANTISSA)) & Int32(-1 << MANTISSA)
        raised = cutlass.select_(amax > 0, raised, Int32(BIAS << MANTISSA))
        return cutlass.select_(amax < Int32(0xFF << MANTISSA), raised, Int32(NAN))

    @cute.jit
    def _store_scale(self, scale_inv, block, row, scale, place):
        if place == 0:
            scale_inv[block, row] = _inverse(scale)

    def _write_rows(self, at, half, which, kept, by_row, of_warp, lane):
        """64 rows of the row copy: of each matrix 8 rows of one parity and 16 columns."""
        matrix, line = lane // 8, lane % 8
        row = of_warp * 16 + line * 2 + matrix % 2
        address = at + row * 128 + ((matrix // 2) ^ (row % 8)) * 16
        for sixteen in range(0, SIXTEEN, 2):
            made = []
            for place in range(4):
                high, pairs = place % 2, kept[which, half, place % 2, sixteen + place // 2]
                values = [value * by_row[which, half, high] for pair in pairs for value in packing.both(pair)]
                made.append(packing.cast(self.element.dtype, *values))
            packing.store_matrices(address ^ (sixteen * 16), made, False)

    def _write_columns(self, at, side, which, kept, factors, of_warp, lane):
        """64 columns of the column copy: of each matrix 8 columns, in twos, and 16 rows."""
        matrix, line = lane // 8, lane % 8
        column = line // 2 * 4 + matrix % 2 * 2 + line % 2
        address = at + column * 128 + ((matrix // 2 * 4 + of_warp) ^ (column % 8)) * 16
        for inside in range(SIXTEEN // 2):
            sixteen = side * (SIXTEEN // 2) + inside
            factor, made = packing.load_numbers(factors + sixteen * 64), []
            for half in range(2):
                rows = [kept[which, half, high, sixteen] for high in range(2)]
                for b in range(2):
                    low, high = (packing.both(pairs[b]) for pairs in rows)
                    values = [row[i] * factor[2 * b + i] for i in range(2) for row in (low, high)]
                    made.append(packing.cast(self.element.dtype, *values))
            packing.store_matrices(address + inside * (16 * 128), made, True)

    @cute.jit
    def _before(self, group, thread):
        """Waits until what was staged before has been read."""
        if thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)

    @cute.jit
    def _after(self, group, thread, store, source, target):
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)
        if thread < WARP:
            cute.copy(store, source, target)
            cute.arch.cp_async_bulk_commit_group()


def _in_pairs(a):
    """(M, K) with rows in the order of Note [Neighbours in a register]."""
    m, k = a.shape
    row = a.stride[0]
    return cute.make_tensor(a.iterator, cute.make_layout(((8, 2, m // 16), k), stride=((row * 2, row, row * 16), 1)))


def _in_fours(b):
    """(N, K) with what becomes columns in that order."""
    n, k = b.shape
    row = b.stride[0]
    strides = ((row, row * 4, row * 2, row * 16), 1)
    return cute.make_tensor(b.iterator, cute.make_layout(((2, 4, 2, n // 16), k), stride=strides))


def _stored_by(store, s_out, tensor):
    pieces = cute.local_tile(tensor, (HALF, BLOCK), (None, None))
    return cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(s_out, 0, 2), cute.group_modes(pieces, 0, 2)
    )


def _raise(found, key, size):
    found[key] = packing.larger(found[key], size) if key in found else size


def _over_lanes(word, apart):
    for lanes in apart:
        word = packing.larger(word, cute.arch.shuffle_sync_bfly(word, lanes))
    return word


def _inverse(scale):
    """What it is multiplied with to be 1: that of 2**127 is a subnormal. What it makes of NaN meets NaN alone."""
    bits = Int32(2 * BIAS << MANTISSA) - scale
    return packing.number(cutlass.select_(bits == 0, Int32(1 << MANTISSA - 1), bits))
