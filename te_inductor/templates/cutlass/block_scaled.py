"""A GEMM for Hopper whose operands have scales of blocks of 128 elements of K. Read by `build.py`'s process alone.

The tensor core sums one block of K, then each thread scales its part of that sum and adds it to another, in fp32. A
thread block makes a tile of 256 x 128 by two warp groups, each of them 64 rows at a time twice: one part and two sums
fill its registers, operands are loaded half as often as for tiles of 64 x 128, and a column's scale, once read, serves
four rows of a thread. Three other warps bring operands and scales, ahead of them and asynchronously, on one barrier a
stage. A tensor that is added comes behind the last block of K in the same way, 64 rows of each warp group a stage, so
that nobody waits for it. docs/ledger.md says what else was tried, and what it took."""

# mypy: ignore-errors
# What CuTe DSL reads as types are values, and its stubs name little of it.

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers
from quack.compile_utils import make_fake_stream, make_fake_tensor

from te_inductor.kernels.cutlass_tiles import ALIGNED, Kernel
from te_inductor.kernels.problem import ANOTHER
from te_inductor.recipes.formats import BLOCK_128X128
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
    bulk_copy,
    copy_async,
    loader,
    next_stage,
    storage_type,
    storer,
    swizzled,
    tensors_of,
    wait,
)

PIECES = 2 * (TILE_N // STORED)  # of HALF x STORED, for both warp groups: what a stage of `a` holds of the added tensor
STORE = 1  # the first of two named barriers, one a warp group
# The registers of a thread, those that multiply and those that load: all that 3 * GROUP threads are given at the
# launch.
REGISTERS = (240, 24)
DTYPES = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
}


def compiled(kernel: Kernel):
    """The compiled launch: ``(a, b, out, added, a_scale, b_scale, clusters, swizzle)`` as `BlockScaledGemm` has
    them."""
    a, b, out = (DTYPES[name] for name in (kernel.a, kernel.b, kernel.out))
    m, n, k, blocks, columns = (cute.sym_int() for _ in range(5))
    square = kernel.scope == BLOCK_128X128.name
    return cute.compile(
        BlockScaledGemm(square, kernel.cluster_m, kernel.cluster_n, 2 if kernel.added == ANOTHER else 0),
        make_fake_tensor(a, (m, k), divisibility=ALIGNED),
        make_fake_tensor(b, (n, k), divisibility=ALIGNED),
        make_fake_tensor(out, (m, n), divisibility=8),
        make_fake_tensor(out, (m, n), divisibility=8) if kernel.added == ANOTHER else None,
        make_fake_tensor(Float32, (blocks, m)),
        make_fake_tensor(Float32, (blocks, columns), leading_dim=0 if square else 1, divisibility=1 if square else 2),
        Int32(1),
        Int32(1),
        make_fake_stream(),
        options="--enable-tvm-ffi",
    )


class BlockScaledGemm:
    """``out[M, N] = sum over blocks k of (a_scale[k, M] * b_scale[k, N]) * (a[M, k] @ b[N, k].T) + added``; K and N are
    multiples of 16. `b_scale` is (K/128, N/128) where b has square blocks."""

    # How far apart a thread's two rows are, of the 16 that a warp's instruction multiplies, and those of threads.
    rows_apart = (8, 1)

    def __init__(self, square: bool, cluster_m: int, cluster_n: int, behind: int = 0) -> None:
        self.square = square
        self.cluster = (cluster_m, cluster_n)
        self.behind = behind  # stages that come behind the last block of K

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (N, K)
        out: cute.Tensor,  # (M, N)
        added: cute.Tensor | None,  # (M, N), of out's dtype
        a_scale: cute.Tensor,  # (K/128, M)
        b_scale: cute.Tensor,  # (K/128, N) or (K/128, N/128)
        clusters: Int32,  # at work at a time
        swizzle: Int32,  # rows of clusters that follow each other
        stream,
    ):
        mma, a_layout, b_layout, loads = self._operands(a, b)
        out_layout = swizzled(out.element_type, (HALF, STORED), 2)
        store, out_tma = storer(out, out_layout, (HALF, STORED))
        added_layout, load_added, added_tma = None, None, None
        if const_expr(added is not None):
            added_layout = swizzled(out.element_type, (HALF, STORED), PIECES * STAGES)
            load_added, added_tma = loader(added, added_layout, (HALF, STORED), 1)

        operands = {"s_a": (a, a_layout), "s_b": (b, b_layout), "s_out": (out, out_layout)}
        self.storage = storage_type({}, operands)
        tensors = (*loads, store, out_tma, load_added, added_tma, a_scale, b_scale)
        self.kernel(mma, *tensors, a_layout, b_layout, out_layout, added_layout, swizzle).launch(
            **self._launched(clusters), stream=stream
        )

    def _operands(self, a, b):
        """The instruction that multiplies, layouts of both operands in shared memory, the copies that bring them
        there."""
        k_major = OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type, b.element_type, k_major, k_major, Float32, (1, 1, 1), (HALF, TILE_N)
        )
        a_layout = swizzled(a.element_type, (TILE_M, BLOCK), STAGES)
        b_layout = swizzled(b.element_type, (TILE_N, BLOCK), STAGES)
        load_a, a_tma = loader(a, a_layout, (TILE_M, BLOCK), self.cluster[1])
        load_b, b_tma = loader(b, b_layout, (TILE_N, BLOCK), self.cluster[0])
        return mma, a_layout, b_layout, (load_a, a_tma, load_b, b_tma)

    def _launched(self, clusters):
        return {"grid": (*self.cluster, clusters), "block": (3 * GROUP, 1, 1), "cluster": (*self.cluster, 1)}

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        a: cute.Tensor,
        load_b: cute.CopyAtom,
        b: cute.Tensor,
        store: cute.CopyAtom,
        out: cute.Tensor,
        load_added: cute.CopyAtom | None,
        added: cute.Tensor | None,
        a_scale: cute.Tensor,
        b_scale: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        out_layout: cute.ComposedLayout,
        added_layout: cute.ComposedLayout | None,
        swizzle: Int32,
    ):
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        begun = self._begin(storage)
        s_a, s_b, s_out, rows, columns = tensors_of(storage, a_layout, b_layout, out_layout)
        s_added = None
        if const_expr(added is not None):  # in the place of a
            s_added = storage.s_a.get_tensor(added_layout.outer, swizzle=added_layout.inner, dtype=s_out.element_type)
        tiles = Tiles.of(self.cluster, out.shape, swizzle)
        blocks = cute.ceil_div(a.shape[1], BLOCK)
        behind = () if added is None else ((load_added, added),)
        finish = (store, s_out, out, s_added)
        self._work(
            *begun, mma, (load_a, a, s_a, load_b, b, s_b), behind, s_added, (a_scale, rows), (b_scale, columns), finish,
            tiles, blocks,
        )  # fmt: skip

    def _begin(self, storage):
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self._init(warp_index, full, empty)
        return warp_index, full, empty

    @cute.jit
    def _work(
        self, warp_index, full, empty, mma, operands, behind, s_behind, of_rows, of_columns, finish, tiles, blocks
    ):
        """What each warp of a thread block does."""
        if warp_index < 8:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self._multiply(mma, full, empty, operands[2], operands[5], of_rows[1], of_columns[1], finish, tiles, blocks)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp_index == 8:
                self._load(full, empty, *operands, behind, s_behind, tiles, blocks)
            elif warp_index == 9:
                self._load_rows(full, empty, *of_rows, tiles, blocks)
            elif warp_index == 10:
                self._load_columns(full, empty, *of_columns, tiles, blocks)

    def _peers(self):
        return self.cluster[0] * self.cluster[1]

    @cute.jit
    def _init(self, warp_index, full, empty):
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + stage, 1 + 2 * WARP)
                    cute.arch.mbarrier_init(empty + stage, 8 * self._peers())
        cute.arch.mbarrier_init_fence()
        if const_expr(self._peers() > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _load(self, full, empty, load_a, a, s_a, load_b, b, s_b, behind, s_behind, tiles, blocks):
        cpasync.prefetch_descriptor(load_a)
        cpasync.prefetch_descriptor(load_b)
        x, y, _ = cute.arch.block_idx()
        rank_m, rank_n = x % self.cluster[0], y % self.cluster[1]
        a_mask, b_mask = Int32(0), Int32(0)
        for peer in cutlass.range_constexpr(self.cluster[1]):
            a_mask = a_mask | (Int32(1) << (rank_m + peer * self.cluster[0]))
        for peer in cutlass.range_constexpr(self.cluster[0]):
            b_mask = b_mask | (Int32(1) << (peer + rank_n * self.cluster[0]))
        a_blocks = cute.local_tile(a, (TILE_M, BLOCK), (None, None))
        b_blocks = cute.local_tile(b, (TILE_N, BLOCK), (None, None))
        to_a, from_a = cpasync.tma_partition(
            load_a,
            rank_n,
            cute.make_layout(self.cluster[1]),
            cute.group_modes(s_a, 0, 2),
            cute.group_modes(a_blocks, 0, 2),
        )
        to_b, from_b = cpasync.tma_partition(
            load_b,
            rank_m,
            cute.make_layout(self.cluster[0]),
            cute.group_modes(s_b, 0, 2),
            cute.group_modes(b_blocks, 0, 2),
        )
        pieces = [_pieces(load, tensor, s_behind) for load, tensor in behind]
        stage, phase = Int32(0), Int32(1)
        tile = tiles.first()
        while tile < tiles.count:
            m, n = tiles.at(tile)
            for k in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (TILE_M + TILE_N) * BLOCK)
                bulk_copy(load_a, from_a[None, m, k], to_a[None, stage], full + stage, a_mask, self.cluster[1])
                bulk_copy(load_b, from_b[None, n, k], to_b[None, stage], full + stage, b_mask, self.cluster[0])
                stage, phase = next_stage(stage, phase)
            for place in cutlass.range_constexpr(self.behind):  # of each tensor a half of both warp groups' rows
                half, which = divmod(place, len(behind))
                to_s, source = pieces[which]
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_M * BLOCK)
                for piece in cutlass.range_constexpr(PIECES):
                    group, side = divmod(piece, TILE_N // STORED)
                    of_piece = source[None, m * 4 + group * 2 + half, n * 2 + side]
                    bulk_copy(behind[which][0], of_piece, to_s[None, stage * PIECES + piece], full + stage, 0, 1)
                stage, phase = next_stage(stage, phase)
            tile += tiles.step()
        # A peer may still release stages of this thread block's.
        for _ in cutlass.range(STAGES, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            stage, phase = next_stage(stage, phase)

    @cute.jit
    def _load_rows(self, full, empty, a_scale, rows, tiles, blocks):
        lane, many = cute.arch.lane_idx(), cute.size(a_scale, mode=[1])
        stage, phase = Int32(0), Int32(1)
        tile = tiles.first()
        while tile < tiles.count:
            m, _ = tiles.at(tile)
            first = m * TILE_M + lane
            for k in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                for i in cutlass.range_constexpr(TILE_M // WARP):
                    if first + WARP * i < many:  # sums behind the edge are not stored
                        copy_async(a_scale[k, None], first + WARP * i, rows[None, stage], lane + WARP * i, 1)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = next_stage(stage, phase)
            stage, phase = self._pass(full, empty, stage, phase)
            tile += tiles.step()

    @cute.jit
    def _load_columns(self, full, empty, b_scale, columns, tiles, blocks):
        """Loads the scales of one thread's columns side by side, or the one of the square block."""
        lane, many = cute.arch.lane_idx(), cute.size(b_scale, mode=[1])
        stage, phase = Int32(0), Int32(1)
        tile = tiles.first()
        while tile < tiles.count:
            _, n = tiles.at(tile)
            for k in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                if const_expr(self.square):
                    if lane == 0 and n < many:
                        copy_async(b_scale[k, None], n, columns[None, stage], 0, 1)
                else:
                    for i in cutlass.range_constexpr(TILE_N // 2 // WARP):
                        pair = n * (TILE_N // 2) + lane + WARP * i
                        if pair < many // 2:
                            # Four threads have two each of eight columns; what a thread reads at once is of sixteen.
                            eight, thread = (lane + WARP * i) // 4, lane % 4
                            place = (eight // 2 * 4 + thread) * 2 + eight % 2
                            copy_async(b_scale[k, None], pair, columns[None, stage], place, 2)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = next_stage(stage, phase)
            stage, phase = self._pass(full, empty, stage, phase)
            tile += tiles.step()

    @cute.jit
    def _pass(self, full, empty, stage, phase):
        """The stages behind the last block have no scales."""
        for _ in cutlass.range_constexpr(self.behind):
            cute.arch.mbarrier_wait(empty + stage, phase)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            stage, phase = next_stage(stage, phase)
        return stage, phase

    @cute.jit
    def _multiply(self, mma, full, empty, s_a, s_b, rows, columns, finish, tiles, blocks):
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // GROUP)
        thread = thread % GROUP
        lane = thread % 32
        mine = mma.get_slice(0)
        a_parts = [_of_half(mma, s_a, group * 2 + half) for half in range(2)]  # (MMA, 1, K/32, stages)
        b_parts = mma.make_fragment_B(mine.partition_B(s_b))
        shape = mma.partition_shape_C((HALF, TILE_N))
        part = cute.make_rmem_tensor(shape, Float32)
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        apart, step = self.rows_apart
        row = group * 2 * HALF + thread // 32 * 16 + lane // 4 * step
        stage, phase = Int32(0), Int32(0)
        tile = tiles.first()
        while tile < tiles.count:
            m, n = tiles.at(tile)
            for half in cutlass.range_constexpr(2):
                sums[half].fill(0.0)
            for _ in cutlass.range(blocks, unroll=1):
                wait(full + stage, phase)
                of_rows = [[rows[row + half * HALF + high * apart, stage] for high in range(2)] for half in range(2)]
                of_columns = cute.make_rmem_tensor((1 if self.square else TILE_N // 4,), Float32)
                if const_expr(self.square):
                    of_columns[0] = columns[0, stage]
                else:
                    strips = cute.logical_divide(columns[None, stage], cute.make_layout(4))
                    for i in cutlass.range_constexpr(TILE_N // 16):
                        cute.autovec_copy(strips[None, i * 4 + lane % 4], cute.local_tile(of_columns, (4,), (i,)))
                for half in cutlass.range_constexpr(2):
                    _multiply_block(mma, part, a_parts[half][None, None, None, stage], b_parts[None, None, None, stage])
                    if const_expr(half == 1):
                        self._release(empty + stage, lane)
                    _add(sums[half], part, of_rows[half], of_columns)
                stage, phase = next_stage(stage, phase)
            stage, phase = self._finish(mma, sums, full, empty, finish, group, thread, m, n, stage, phase)
            tile += tiles.step()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _finish(self, mma, sums, full, empty, finish, group, thread, m, n, stage, phase):
        store, s_out, out, s_added = finish
        for half in cutlass.range_constexpr(self.behind):
            wait(full + stage, phase)
            self._add_to(sums[half], mma, s_added, thread, stage * PIECES + group * (TILE_N // STORED))
            self._release_read(empty + stage, thread % WARP)
            stage, phase = next_stage(stage, phase)
        self._store(mma, sums, store, s_out, out, group, thread, m * 4 + group * 2, n * 2)
        return stage, phase

    @cute.jit
    def _release_read(self, empty, lane):
        """What threads have read, before the accelerator writes there: without the fence, 13 and 70 of 320 products
        were wrong (4096 and 16384 x 4096 x 4096, clusters of 2 x 1, H200), and all of them in a few places."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self._release(empty, lane)

    @cute.jit
    def _release(self, empty, lane):
        if const_expr(self._peers() == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty)
        else:
            if lane < self._peers():
                cute.arch.mbarrier_arrive(empty, lane)

    @cute.jit
    def _add_to(self, total, mma, s_added, thread, first):
        """64 rows of a warp group's, from their pieces in shared memory."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), s_added.element_type)
        copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(_store_atom(s_added.element_type), mma))
        from_s = copy.get_slice(thread).partition_S(s_added)
        narrow = cute.make_rmem_tensor(cute.size(total) // (TILE_N // STORED), s_added.element_type)
        for side in cutlass.range_constexpr(TILE_N // STORED):
            source = from_s[None, None, None, first + side]
            cute.copy(copy, source, cute.make_tensor(narrow.iterator, cute.make_layout(source.shape)))
            for i in cutlass.range_constexpr(cute.size(narrow)):
                place = side * cute.size(narrow) + i
                total[place] = total[place] + Float32(narrow[i])

    @cute.jit
    def _store(self, mma, sums, store, s_out, out, group, thread, m, n):
        atom = _store_atom(s_out.element_type)
        copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, mma))
        pieces = cute.local_tile(out, (HALF, STORED), (None, None))
        from_s, to_out = cpasync.tma_partition(
            store, 0, cute.make_layout(1), cute.group_modes(s_out, 0, 2), cute.group_modes(pieces, 0, 2)
        )
        to_s = copy.get_slice(thread).partition_D(s_out)
        narrow = cute.make_rmem_tensor(cute.size(sums[0]) // 2, s_out.element_type)
        for half in cutlass.range_constexpr(2):
            for side in cutlass.range_constexpr(TILE_N // STORED):
                for i in cutlass.range_constexpr(cute.size(narrow)):
                    narrow[i] = s_out.element_type(sums[half][side * cute.size(narrow) + i])
                if thread < 32:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)
                target = to_s[None, None, None, group]
                cute.copy(copy, cute.make_tensor(narrow.iterator, cute.make_layout(target.shape)), target)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=STORE + group, number_of_threads=GROUP)
                if thread < 32:
                    cute.copy(store, from_s[None, group], to_out[None, m + half, n + side])
                    cute.arch.cp_async_bulk_commit_group()


def _pieces(load, tensor, s_pieces):
    """Both sides of the copies that bring what is read behind the last block, HALF x STORED each."""
    cpasync.prefetch_descriptor(load)
    pieces = cute.local_tile(tensor, (HALF, STORED), (None, None))
    return cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(s_pieces, 0, 2), cute.group_modes(pieces, 0, 2)
    )


def _of_half(mma, s_a, half):
    return mma.make_fragment_A(mma.get_slice(0).partition_A(cute.local_tile(s_a, (HALF, BLOCK, STAGES), (half, 0, 0))))


def _store_atom(dtype):
    return cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)


@cute.jit
def _multiply_block(mma, part, a_part, b_part):
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(a_part, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(atom, part, a_part[None, None, k], b_part[None, None, k], part)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def _add(total, part, of_rows, of_columns):
    if cute.size(of_columns) == 1:
        of_rows = [scale * of_columns[0] for scale in of_rows]
    for k in range(TILE_N // 8):
        for i in range(2):
            for j in range(2):
                place = ((i, j, k), 0, 0)
                scaled = part[place] if cute.size(of_columns) == 1 else part[place] * of_columns[2 * k + i]
                total[place] = scaled * of_rows[j] + total[place]
