"""Loads of a kernel that stay in the cache, and sums of rows that are made in one order whatever else their kernel does:
Note [Rows by themselves] in passes/pre_grad/decide/invariance.py.

# Note [Loads that stay]
Of a reduction Inductor has each load evicted first that is contiguous and that the same program does not read again,
also where other programs read the same: a gather's, which reads a token's row for each expert of it, and a row that
stands for several. Such a tensor has fewer elements than the kernel goes through. Triton makes a policy of the second
level's cache of it, too. So it is loaded to be evicted last, beside what is read once.

# Note [One layout]
A tile of one size is not enough. Triton reduces the elements that a thread holds before those of other threads, and
which these are is the tile's layout. It chooses that by how many bytes a thread may load at once: by a mask of keys,
say, which a step of generation reads in words of 8 elements, and training does not have. So such kernels are not told
that their tensors are aligned: each thread then loads an element at a time, neighbours next to each other, and there is
one layout."""

from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from te_inductor.lowerings.codegen.column_pairs import PairsKernel


class RereadKernel(PairsKernel):
    """Inductor's Triton kernel, which keeps what it reads several times."""

    _rereads = False  # whether the load that is being written does

    def load(self, name: str, index: sympy.Expr) -> Any:
        padded = self._load_mask is not None  # by zeros, which are no elements
        self._rereads = self.inside_reduction and self.of_ours and not padded and self._has_fewer_elements(name)
        try:
            return super().load(name, index)
        finally:
            self._rereads = False

    def is_broadcasted(self, index: sympy.Expr) -> bool:
        """Says yes to such an index, so that Inductor has the load evicted last."""
        return self._rereads or bool(super().is_broadcasted(index))

    def _has_fewer_elements(self, name: str) -> bool:
        return bool(
            V.graph.sizevars.statically_known_leq(2 * V.graph.get_numel(name), sympy_product(self.numels.values()))
        )


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
