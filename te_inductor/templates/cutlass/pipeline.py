"""What GEMMs of blocks share: which tiles a thread block computes, its shared memory, the copies that fill and empty it, and
the stages that they take turns in. Read by `build.py`'s process alone."""

# mypy: ignore-errors

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from te_inductor.kernels.cutlass_tiles import BLOCK_TILE

BLOCK = 128  # elements of K that a scale is for
TILE_M, TILE_N = BLOCK_TILE
WARP, GROUP = 32, 128  # threads
HALF = 64  # rows that one instruction computes
STAGES = 4
STORED = 64  # columns that a warp group stores at a time


class Tiles:
    """The tiles that a thread block computes, in an order that lets L2 serve `swizzle` rows of clusters."""

    def __init__(self, cluster, m, n, swizzle):
        self.cluster, self.m, self.n, self.swizzle = cluster, m, n, swizzle  # m and n in clusters

    @classmethod
    def of(cls, cluster, shape, swizzle):
        m, n = (
            cute.ceil_div(size, tile * many) for size, tile, many in zip(shape, (TILE_M, TILE_N), cluster, strict=True)
        )
        return cls(cluster, m, n, swizzle)

    def __extract_mlir_values__(self):
        return [value for each in (self.m, self.n, self.swizzle) for value in cutlass.extract_mlir_values(each)]

    def __new_from_mlir_values__(self, values):
        return type(self)(self.cluster, *(Int32(value) for value in values))

    @property
    def count(self):
        return self.m * self.n

    def first(self):
        return cute.arch.block_idx()[2]

    def step(self):
        return cute.arch.grid_dim()[2]

    def at(self, tile):
        x, y, _ = cute.arch.block_idx()
        strip, place = tile // (self.swizzle * self.n), tile % (self.swizzle * self.n)
        high = cutlass.min(self.swizzle, self.m - strip * self.swizzle)
        return (strip * self.swizzle + place % high) * self.cluster[0] + x, place // high * self.cluster[1] + y


def swizzled(dtype, shape, stages):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))


def storage_type(more, tiles):
    """The shared memory of a thread block: barriers and scales of each stage, `more`, and the tiles by name, each a
    tensor of global memory and its layout here."""
    scales = {
        name: cute.struct.Align[cute.struct.MemRange[Float32, many * STAGES], 128]
        for name, many in (("rows", TILE_M), ("columns", TILE_N))
    }
    aligned = {
        name: cute.struct.Align[cute.struct.MemRange[tensor.element_type, cute.cosize(layout)], 1024]
        for name, (tensor, layout) in tiles.items()
    }
    barriers = dict.fromkeys(("full", "empty"), cute.struct.MemRange[Int64, STAGES])
    return cute.struct(type("Storage", (), {"__annotations__": {**barriers, **scales, **more, **aligned}}))


def tensors_of(storage, a_layout, b_layout, out_layout):
    """Both operands, what is stored, and the scales of rows and columns there."""
    tiles = ((storage.s_a, a_layout), (storage.s_b, b_layout), (storage.s_out, out_layout))
    scales = ((storage.rows, TILE_M), (storage.columns, TILE_N))
    return [
        *(part.get_tensor(layout.outer, swizzle=layout.inner) for part, layout in tiles),
        *(part.get_tensor(cute.make_layout((many, STAGES))) for part, many in scales),
    ]


def storer(tensor, layout, tile):
    op = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), tile)


def loader(tensor, layout, tile, peers):
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if peers > 1 else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), tile, num_multicast=peers)


def bulk_copy(atom, source, target, barrier, mask, peers):
    given = {"mcast_mask": cutlass.Int16(mask)} if peers > 1 else {}
    cute.copy(atom, source, target, tma_bar_ptr=barrier, **given)


def copy_async(source, place, target, to, count):
    """`count` values from where `place` says, in units of them."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=Float32.width * count)
    cute.copy(atom, cute.local_tile(source, (count,), (place,)), cute.local_tile(target, (count,), (to,)))


@cute.jit
def wait(barrier, phase):
    done = cute.arch.mbarrier_try_wait(barrier, phase)
    while not done:
        done = cute.arch.mbarrier_try_wait(barrier, phase)


def next_stage(stage, phase):
    after = (stage + 1) % STAGES  # a power of two
    return after, phase ^ cutlass.Int32(after == 0)
