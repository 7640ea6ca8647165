"""Kernels that quantize, with a sigmoid, an erfc and casts to FP8 of our own, in PTX, and column copies in pairs of rows.

Kernels of SwiGLU, of GELU and of their backward are bound by their instructions where GEMMs have lowered the card's
clock. For the casts see Note [Casts in PTX] in templates/triton/ptx.py.

# Note [Pairs of rows]
A tile is read along rows and its column copy is written along columns, so that it crosses shared memory. By bytes that
is two instructions an element and their addresses, as hardware transposes 16 bits and no less (`ldmatrix`). So a kernel
that writes both copies puts two rows that are neighbours in the column copy into one thread: row r of the first half of
its tile is row 2r of the tensor, row r of the second half is row 2r + 1. A permutation of the index, which nothing else
notices; rows are read whole either way. Words of four casts of either row become two words of pairs by two byte
permutations (ptx.py), and the pairs are moved, as 16-bit elements, by `ldmatrix`. A thread must have 32 elements for
that, else Triton moves them otherwise, and as slowly as bytes.

Instructions an element on sm_90 (Triton 3.6 and 3.7 alike), and microseconds in a training step (H200, torch 2.11, triton
3.6, 2026-11-22), without and with pairs::

                                          instructions      us
    SwiGLU's backward, delayed scaling    42.5    30.6     719   690
    RMSNorm, delayed scaling              15.2    11.8      86    96
    a gradient, delayed scaling           12.3     8.9      70    72
    SwiGLU, blocks                        26.4    23.7     538   483
    its gradients, blocks                 31.0    28.3     594   580
                                          26.3    23.6     509   487
    a gradient, blocks                    18.3    15.6     103    98

So kernels with few instructions are left as they are (`tiles.PAIRED`).
"""

import functools
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.triton import TritonKernelOverrides, maybe_upcast_float32
from torch._inductor.utils import triton_type
from torch._inductor.virtualized import V

from te_inductor.lowerings.codegen import holds_ops_of_ours, tiles
from te_inductor.lowerings.codegen.block_tiles import BlockKernel
from te_inductor.templates.triton.ptx import (
    CAST_CONSTRAINTS,
    CAST_PACK,
    CASTS,
    ERFC,
    PAIRS,
    PAIRS_CONSTRAINTS,
    PAIRS_PACK,
    SIGMOID,
)


@maybe_upcast_float32()  # type: ignore[untyped-decorator]
def _sigmoid(x: Any) -> str:
    return _of_one(SIGMOID, x)


@maybe_upcast_float32()  # type: ignore[untyped-decorator]
def _erfc(x: Any) -> str:
    return _of_one(ERFC, x)


def _of_one(ptx: str, x: Any) -> str:
    return f"tl.inline_asm_elementwise({ptx!r}, '=f,f', [{x}], dtype=tl.float32, is_pure=True, pack=1)"


def is_tile(x: Any) -> bool:
    """Tells whether x has two dimensions, so that it may be stored both ways. What a reduction leaves is none: a scale
    that is FP8 may be alone in its program, and makes no word."""
    return not V.kernel.features.is_reduction() and sum(str(size) != "1" for size in x.shape) == 2


class _Overrides(TritonKernelOverrides):
    @staticmethod
    def sigmoid(x: Any) -> str:
        return TritonKernelOverrides.sigmoid(x) if x.dtype == torch.float64 else _sigmoid(x)  # type: ignore[no-any-return]

    @staticmethod
    def erfc(x: Any) -> str:
        return TritonKernelOverrides.erfc(x) if x.dtype == torch.float64 else _erfc(x)  # type: ignore[no-any-return]

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> str:
        text: str = TritonKernelOverrides.to_dtype(x, dtype, *args, **kwargs)  # notes how many a thread must have
        if dtype not in CASTS or x.dtype != torch.float32 or not is_tile(x):
            return text
        how = (
            f"{CASTS[dtype]!r}, {CAST_CONSTRAINTS!r}, [{x}], dtype={triton_type(dtype)}, is_pure=True, pack={CAST_PACK}"
        )
        return f"tl.inline_asm_elementwise({how})"


class AssemblyKernel(BlockKernel):
    """Inductor's Triton kernel with these, where an op of ours is part of it."""

    def __init__(self, *args: Any, features: Any, **kwargs: Any) -> None:
        super().__init__(*args, features=features, **kwargs)
        self.of_ours = holds_ops_of_ours(features.scheduler_nodes())
        if self.of_ours:
            self.overrides = _Overrides


class PairsKernel(AssemblyKernel):
    """Inductor's Triton kernel, where it writes both copies: Note [Pairs of rows]."""

    @functools.cached_property
    def _paired(self) -> str | None:
        """The dimension of the tile whose neighbours become pairs."""
        if self.fixed_config is None or self.inside_reduction:
            return None
        return tiles.paired_dimension(list(self.features.scheduler_nodes()), self.numels)

    def iteration_ranges_ranges_code(self, entry: Any) -> str:
        code = str(super().iteration_ranges_ranges_code(entry))
        half = f"({entry.prefix.upper()}BLOCK // 2)"
        return f"({code} % {half} * 2 + {code} // {half})" if entry.prefix == self._paired else code

    def iteration_ranges_codegen_header(self, entry: Any, code: Any) -> None:
        super().iteration_ranges_codegen_header(entry, code)
        prefix = entry.prefix
        if prefix == self._paired:
            half = f"({prefix.upper()}BLOCK // 2)"
            pairs = super().iteration_ranges_ranges_code(entry).replace(f"{prefix.upper()}BLOCK", half)
            code.writeline(f"{prefix}pair = {self.iteration_ranges_get_pid(entry)} * {half} + {pairs}")

    def store(self, name: str, index: sympy.Expr, value: Any, mode: Any = None) -> None:
        pairs = self._index_of_pairs(index) if mode is None and value.dtype in CASTS and is_tile(value) else None
        if pairs is None:
            super().store(name, index, value, mode)
            return
        argument = self.args.output(name)
        y, x = self.dense_size_list()
        halves, order = (f"2, {y} // 2, {x}", "1, 2, 0") if self._paired == "y" else (f"{y}, 2, {x} // 2", "0, 2, 1")
        first, second = f"{argument}_first", f"{argument}_second"
        place = self.kexpr(self.rename_indexing(pairs))
        words = (
            f"{PAIRS!r}, {PAIRS_CONSTRAINTS!r}, [{first}, {second}], dtype=tl.uint16, is_pure=True, pack={PAIRS_PACK}"
        )
        for line in (
            f"{first}, {second} = tl.split(tl.permute(tl.reshape({value}, [{halves}]), [{order}]))",
            f"tl.store({argument}.to(tl.pointer_type(tl.uint16)) + ({place}), tl.inline_asm_elementwise({words}),"
            f" {self._mask_of_pairs()})",
        ):
            self.stores.writeline(DeferredLine(name, line))

    def _index_of_pairs(self, index: sympy.Expr) -> sympy.Expr | None:
        """Returns an index in units of pairs, where those of a column copy are neighbours in memory at even places."""
        if self._paired is None:
            return None
        index = self.prepare_indexing(index)
        nodes = self.range_tree_nodes
        positions = [s for s in index.free_symbols if s in nodes and nodes[s].root.prefix == self._paired]
        if len(positions) != 1 or not self._is_whole(positions[0]) or index.coeff(positions[0]) != 1:
            return None
        halved = sympy.expand((index - positions[0]) / 2)
        if any(not term.as_coeff_Mul()[0].is_integer for term in sympy.Add.make_args(halved)):
            return None
        return halved + sympy.Symbol(f"{self._paired}pair", integer=True, nonnegative=True)

    def _mask_of_pairs(self) -> str:
        pairs = {f"{self._paired}mask": f"({self._paired}pair * 2 < {self._paired}numel)"}
        return " & ".join(pairs.get(mask, mask) for mask in self.tile_masks()) or "None"
