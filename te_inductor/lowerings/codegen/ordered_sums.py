"""Sums of rows that are made in one order whatever else their kernel does: Note [Rows by themselves] in
passes/pre_grad/decide/invariance.py.

# Note [One layout]
A tile of one size is not enough. Triton reduces the elements that a thread holds before those of other threads, and
which these are is the tile's layout. It chooses that by how many bytes a thread may load at once: by a mask of keys,
say, which a step of generation reads in words of 8 elements, and training does not have. So such kernels are not told
that their tensors are aligned: each thread then loads an element at a time, neighbours next to each other, and there is
one layout."""

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig

from te_inductor.lowerings.codegen.rereads import RereadKernel

# The tile of rows that are summed: a program for each row, which adds so many elements at a time to as many sums, and
# these up at the end. So zeros behind a row's end change no sum.
SUMMED_ROW = {"XBLOCK": 1, "R0_BLOCK": 1024, "num_warps": 4}


def fixed_config() -> FixedTritonConfig:
    """The configuration of a kernel that has such sums."""
    return FixedTritonConfig(dict(SUMMED_ROW))


class OrderedSumsKernel(RereadKernel):
    """Inductor's Triton kernel, with one layout where it has that configuration: Note [One layout]."""

    def codegen_kernel(self, *args: Any, **kwargs: Any) -> Any:
        in_order = self.fixed_config is not None and self.fixed_config.config == SUMMED_ROW
        with config.patch({"triton.divisible_by_16": False} if in_order else {}):
            return super().codegen_kernel(*args, **kwargs)
