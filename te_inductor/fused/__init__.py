"""Fused kernels: one file each, with what it matches in a graph, the op that takes its place, eager form, fake and lowering.

To add one: a file with a `KERNEL`, and its name in KERNELS.
"""

from collections.abc import Callable

from torch import fx

from te_inductor.fused import column_sums, decode_attention, gated_dgrad, quantized_epilogue, residual_epilogue
from te_inductor.lowerings.registry import lowering

KERNELS = (
    residual_epilogue.KERNEL,
    gated_dgrad.KERNEL,
    quantized_epilogue.KERNEL,
    column_sums.KERNEL,
    decode_attention.KERNEL,
)


def folds(stage: str) -> tuple[Callable[[fx.Graph], None], ...]:
    """The passes of one stage, in order."""
    return tuple(kernel.fold for kernel in KERNELS if stage in kernel.stages)


for _kernel in KERNELS:
    if _kernel.lower is not None:
        lowering(_kernel.op)(_kernel.lower)
