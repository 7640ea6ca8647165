"""The amax of a tensor inside the kernel that casts it: each program of a pointwise kernel reduces its own tile and
raises one number in memory by an atomic max.

Inductor knows reductions and pointwise kernels. A reduction of the whole tensor would be a kernel of its own that reads the
tensor once more, which is what delayed scaling exists to avoid. So the amax is a pointwise store of a mode of our own,
to one address, and `AmaxKernel` writes it. It costs a cast of 16384 x 4096 1% (plain Triton,
72.7 us for 71.9, H200, 2026-11-21).

Magnitudes are compared as int32 bit patterns (`values.magnitude`), so that NaN wins, and no float min/max stands
beside a transposed fp8 store (Triton issue 11111).
"""

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.triton import TritonKernel
from torch.utils._ordered_set import OrderedSet

from te_inductor.lowerings.codegen import scattered

MODE = "atomic_max"  # of a store: raise the int32 at the address to the largest of all values


def raise_to_amax(amax: ir.TensorBox, bits: ir.TensorBox) -> None:
    """Raises in place: `amax`, fp32, () or the first number of state, becomes at least the number with the largest of
    the bit patterns."""
    amax.realize()
    place = [0] * len(amax.get_size())
    layout = ir.MutationLayoutSHOULDREMOVE(amax)
    scattered(layout, torch.int32, bits.get_size(), bits.make_loader(), lambda index: place, MODE)


class AmaxKernel(TritonKernel):
    """Inductor's Triton kernel, with stores of `MODE`."""

    def want_no_x_dim(self) -> bool:
        """A fixed tile of one row would have no dimension of rows, which torch 2.11 misses where a load has no
        other."""
        return False

    def tile_masks(self) -> OrderedSet[str]:
        """What says which elements of the tile are the tensor's; none where all are."""
        masks: OrderedSet[str] = OrderedSet(f"{tree.prefix}mask" for tree in self.active_range_trees())
        self.filter_masks(masks)
        return masks

    def store(self, name: str, index: sympy.Expr, value: Any, mode: Any = None) -> None:
        if mode != MODE:
            super().store(name, index, value, mode)
            return
        self.atomic_add_found = True  # 64-bit pointers, and no timing of a kernel that is not idempotent
        argument = self.args.output(name)  # names below follow it, so that equal kernels stay equal
        pointer = f"{argument}.to(tl.pointer_type(tl.int32))"
        size = self.dense_size_str()
        masks = self.tile_masks()
        tile = f"tl.broadcast_to({value}, {size})"
        if masks:
            tile = f"tl.where(tl.broadcast_to({' & '.join(masks)}, {size}), {tile}, 0)"
        largest, raised, code = f"{argument}_amax", f"{argument}_raised", self.stores
        if self._is_turn_of_a_loop():
            # Each turn raises a tile in registers, and the program raises the amax once, behind its loop.
            turns = f"{argument}_turns"
            self.body.writeline(f"{turns} = tl.zeros({size}, tl.int32)")
            self.stores.writeline(DeferredLine(name, f"{turns} = tl.maximum({turns}, {tile})"))
            tile, code = turns, self.post_loop_store
        for line in (
            f"{largest} = tl.max({tile})",
            # Most tiles raise nothing. An atomic on one address is served one by one, a load by every cache; a stale
            # value is too low and costs an atomic, no more.
            f"{raised} = {largest} > tl.load({pointer})",
            f"tl.atomic_max({pointer}, {largest}, mask={raised}, sem='relaxed')",
        ):
            code.writeline(DeferredLine(name, line))

    def _is_turn_of_a_loop(self) -> bool:
        """Whether what is written now runs once a turn of a loop over a reduction's elements. (A kernel that sums rows
        and columns at once has another loop, over rows.)"""
        looped = any(tree.is_loop for tree in self.range_trees)
        return bool(self.inside_reduction and looped and not getattr(self, "mix_order_reduction", False))
