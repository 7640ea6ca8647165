"""Kernels that quantize, with a sigmoid, an erfc and casts to FP8 of our own, in PTX.

Kernels of SwiGLU, of GELU and of their backward are bound by their instructions where GEMMs have lowered the card's
clock. For the casts see Note [Casts in PTX] in templates/triton/ptx.py."""

from typing import Any

import torch
from torch._inductor.codegen.triton import TritonKernelOverrides, maybe_upcast_float32
from torch._inductor.utils import triton_type
from torch._inductor.virtualized import V

from te_inductor.lowerings.codegen import holds_ops_of_ours
from te_inductor.lowerings.codegen.block_tiles import BlockKernel
from te_inductor.templates.triton.ptx import CAST_CONSTRAINTS, CAST_PACK, CASTS, ERFC, SIGMOID


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
