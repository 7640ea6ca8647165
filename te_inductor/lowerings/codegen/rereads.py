"""The loads of a kernel that stay in the cache.

Of a reduction Inductor has each load evicted first that is contiguous and that the same program does not read again,
also where other programs read the same: a gather's, which reads a token's row for each expert of it, and a row that
stands for several. Such a tensor has fewer elements than the kernel goes through. Triton makes a policy of the second
level's cache of it, too. So it is loaded to be evicted last, beside what is read once."""

from typing import Any

import sympy  # type: ignore[import-untyped]
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
