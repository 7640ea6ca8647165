"""Tensors side by side in one buffer, each computed into its place: what `ir.ConcatKernel.create` does, for any order
of strides and for buffers that hold one value a block."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv


class Concatenation:
    """A place for something of which some matrices (R, C) have one a block, hence (R / rows, C / columns) each. Of one
    matrix it is a buffer of its own."""

    def __init__(
        self,
        matrices: Sequence[ir.TensorBox],
        dim: int,
        dtype: torch.dtype,
        block: tuple[int, int],  # rows and columns
        order: tuple[int, int],  # of the strides, 0 for the contiguous dimension
    ) -> None:
        self.dim = dim
        self.sizes: list[list[Any]] = [
            [FloorDiv(*pair) for pair in zip(x.get_size(), block, strict=True)] for x in matrices
        ]
        whole = list(self.sizes[0])
        whole[dim] = sum(size[dim] for size in self.sizes)
        strides = ir.FlexibleLayout.fill_ordered(whole, list(order))
        self.layout = ir.FixedLayout(matrices[0].get_device_or_error(), dtype, whole, strides)
        self.kernel = ir.ConcatKernel(name=None, layout=self.layout, inputs=[])
        self.box = ir.StorageBox(self.kernel)

    def places(self) -> list[ir.Layout]:
        """A layout for the buffer of each matrix."""
        if len(self.sizes) == 1:
            return [self.layout]
        made: list[ir.Layout] = []
        start = 0
        for size in self.sizes:
            end = start + size[self.dim]
            part = ir.SliceView.create(self.box, self.dim, start, end, clamp=False)
            made.append(ir.NonOwningLayout(part))  # type: ignore[arg-type]
            start = end
        return made

    def filled(self, parts: Sequence[ir.TensorBox]) -> ir.TensorBox:
        """All of it, when each part has been given its layout."""
        if len(parts) == 1:
            return parts[0]
        self.kernel.inputs = [part.data.data for part in parts]  # type: ignore[attr-defined]
        self.kernel.name = V.graph.register_buffer(self.kernel)
        V.graph.register_operation(self.kernel)
        return ir.TensorBox(self.box)
