"""The sigmoid of kernels that quantize, in four instructions.

Triton's takes twelve on sm_90, of which eight are for exponentials below 2**-126 and denominators above 2**126. Neither
changes a sigmoid above 2**-126; below, this one is 0. Both of its approximations are to 2 ulp or better (PTX ISA,
ex2.approx.ftz.f32, rcp.approx.ftz.f32), as Triton's are. Kernels of SwiGLU and its backward are bound by their instructions
where GEMMs have lowered the card's clock.
"""

from typing import Any

import torch
from torch._inductor.codegen.triton import TritonKernelOverrides, maybe_upcast_float32

from te_inductor.lowerings.block_tiles import BlockKernel

# 1 / (1 + 2**(x * -log2(e)))
PTX = (
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
    " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)


@maybe_upcast_float32()  # type: ignore[untyped-decorator]
def _sigmoid(x: Any) -> str:
    return f"tl.inline_asm_elementwise({PTX!r}, '=f,f', [{x}], dtype=tl.float32, is_pure=True, pack=1)"


class _Overrides(TritonKernelOverrides):
    @staticmethod
    def sigmoid(x: Any) -> str:
        return TritonKernelOverrides.sigmoid(x) if x.dtype == torch.float64 else _sigmoid(x)  # type: ignore[no-any-return]


class SigmoidKernel(BlockKernel):
    """Inductor's Triton kernel with that sigmoid, where an op of ours is part of it."""

    def __init__(self, *args: Any, features: Any, **kwargs: Any) -> None:
        super().__init__(*args, features=features, **kwargs)
        origins = (origin for node in features.scheduler_nodes() for origin in node.node.get_origins())
        if any(getattr(origin.target, "namespace", None) == "te_inductor" for origin in origins):
            self.overrides = _Overrides
