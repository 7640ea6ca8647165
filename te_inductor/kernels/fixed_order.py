"""Products of which each element is summed in one order, as `options={"batch_invariant": True}` asks, and how it cuts the
work.

# Note [One order of sums]
A library chooses a kernel by M, and with it in which parts K is summed up: so a row's result depends on how many rows
stand beside it, and a token's on the batch, on whether it is one of a prompt, and on whether the step trains. Here one
kernel multiplies, in one way for each weight: its tile, the columns that it reads at a time and the warps follow from N
and dtypes alone, no two programs share a K, and rows that are not there are zeros in the same tile. An element's sum
then takes the same instructions in the same order, wherever its row stands.

- Scales of rows are multiplied to the sum; those of blocks of 128 along K to the sum of their block, in the order of K.
- Zeros behind the last column add nothing. So a product over keys of a cache that is longer than its contents, whose
  weights there are zero, is that over the contents.
- The tensor core keeps some 14 bits of an FP8 sum, so each 128 columns are added to one in fp32.
- On a CPU the order is that of the columns, one after the other, in fp32, without a fused multiply and add.

The backward is not held to that: it multiplies by the kernels that it has otherwise."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import DENSE, Problem
from te_inductor.numerics import scaled_products
from te_inductor.recipes.constants import Constant, constant
from te_inductor.targets import sm90

WIDE_FROM = 128 * sm90.LIMITS.multiprocessors  # columns of the result from which each multiprocessor has a wide tile


@constant
class FixedOrderConfig(Constant):
    """How the work is cut."""

    block_n: int  # columns of the result in one program
    block_k: int  # columns of the operands that it reads at a time
    rows: int = 64  # of the result: what an instruction of Hopper's multiplies
    warps: int = 4
    stages: int = 4


def cut(n: int, itemsize: int) -> FixedOrderConfig:
    """The config for a weight of so many rows, and operands of so many bytes an element: 128 bytes at a time."""
    return FixedOrderConfig(128 if n >= WIDE_FROM else 64, 128 // itemsize if itemsize < 4 else 32)


def _supports(problem: Problem) -> Refusal | None:
    return None if problem.gemm.fixed_order else Refusal("sums may be made in any order")


FAMILY = KernelFamily("fixed_order", (DENSE,), _supports, written=scaled_products.in_fixed_order)
