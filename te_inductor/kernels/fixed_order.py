"""Products of which each element is summed in one order, as `options={"batch_invariant": True}` asks, and how it cuts the
work.

# Note [One order of sums]
A library chooses a kernel by M, and with it in which parts K is summed up: so a row's result depends on how many rows
stand beside it, and a token's on the batch, on whether it is one of a prompt, and on whether the step trains. Here an
element's sum is one chain for each weight, whatever M is. No two programs share a K. An instruction of the tensor core
sums 32 bytes of each row along K, and adds them to the sum of the instructions before; how many rows and columns it
multiplies says which elements it computes, and nothing of how one is summed. So the tile may follow from M, N and the
batch: wide tiles for many rows, which multiply fast, and narrow ones for few, so that each multiprocessor reads a part of
the weight. All tiles have 64 rows an instruction, as Hopper's have, and rows that are not there are zeros in them.

- Scales of rows are multiplied to the sum; those of blocks of 128 along K to the sum of their block, in the order of K.
- Zeros behind the last column add nothing. So a product over keys of a cache that is longer than its contents, whose
  weights there are zero, is that over the contents.
- The tensor core keeps some 14 bits of an FP8 sum, so each 128 columns are added to one in fp32, also where a program
  reads more columns at a time.
- On a CPU the order is that of the columns, one after the other, in fp32, without a fused multiply and add.

The backward is not held to that: it multiplies by the kernels that it has otherwise."""

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, Problem
from te_inductor.numerics import scaled_products
from te_inductor.recipes.constants import Constant, constant
from te_inductor.targets.target import Limits


@constant
class FixedOrderConfig(Constant):
    """How the work is cut."""

    rows: int  # of the result in one program
    block_n: int  # columns of the result in one program
    block_k: int  # columns of the operands that it reads at a time
    warps: int
    stages: int


ATOM = 128  # bytes along K that are read at a time; of FP8, the columns of which the tensor core keeps a sum
# Rows, columns, atoms, warps and stages of a tile, from that which multiplies fastest to that which cuts a weight into most
# programs. What the stages hold fits in Hopper's shared memory.
TILES = ((128, 128, 1, 8, 4), (64, 64, 1, 4, 6), (64, 32, 2, 4, 8), (64, 16, 2, 4, 8))
EXACT = FixedOrderConfig(64, 64, 32, 4, 4)  # of fp32, which no tensor core multiplies
KEPT = 2048  # bytes of shared memory beside the stages
BUSY = 7 / 8  # of the multiprocessors has a program, at least


def cut(limits: Limits, batch: int, m: int, n: int, k: int, itemsize: int, blocked: bool) -> FixedOrderConfig:
    """The config for so many products (m, k) by (n, k) of elements of so many bytes, with scales of blocks or without."""
    if itemsize == torch.float32.itemsize:
        return EXACT
    sizes = [(rows, batch * -(-m // rows) * -(-n // columns)) for rows, columns, *_ in TILES]
    least = BUSY * limits.multiprocessors
    enough = (tile for tile, (rows, programs) in enumerate(sizes) if rows <= max(m, 64) and programs >= least)
    return config_of(limits, next(enough, len(TILES) - 1), k, itemsize, blocked)


def config_of(limits: Limits, tile: int, k: int, itemsize: int, blocked: bool) -> FixedOrderConfig:
    """The config of a tile. It reads one atom at a time where scales of blocks change behind it, or K ends. It has no more
    stages than K has parts, so that more programs of short sums run at once, and than shared memory holds."""
    rows, columns, atoms, warps, stages = TILES[tile]
    width = ATOM * (1 if blocked or k * itemsize % (ATOM * atoms) else atoms)
    most = (limits.shared_memory - KEPT) // (width * (rows + columns)), -(-k * itemsize // width)
    return FixedOrderConfig(rows, columns, width // itemsize, warps, max(2, min(stages, *most)))


def _supports(problem: Problem) -> Refusal | None:
    return None if problem.gemm.fixed_order else Refusal("sums may be made in any order")


FAMILY = KernelFamily("fixed_order", (DENSE,), _supports, written=scaled_products.in_fixed_order)
