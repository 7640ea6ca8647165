"""The tile of Inductor's own kernels that write a rowwise and a columnwise copy at one read.

# Note [Square tiles for two-way casts]
Inductor fuses the producer, the cast and both stores into one 2D pointwise kernel, but its candidates for a 64 x 64 tile
run 8 warps, and it settles at 60% of copy bandwidth for casts to fp8 (H200, torch 2.11, 2026-11). The same kernel with a
64 x 64 tile and 4 warps reaches 87-91%: each thread holds 32 elements, so both the row store and the column store are
16 bytes wide. docs/performance.md has the figures. Nothing else of the kernel changes, and no autotuning is needed.
"""

from collections.abc import Callable
from typing import Any

from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.virtualized import V

from te_inductor import ops

TWO_WAY_CAST = {"XBLOCK": 64, "YBLOCK": 64, "num_warps": 4}


class Choices:
    """Inductor's heuristics with our tile for two-way casts; everything else is asked of the heuristics in force."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> Any:
        kernel_kwargs = self._inner.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        if "fixed_config" not in kernel_kwargs and _is_two_way_cast(features, groups[0]):
            kernel_kwargs = {**kernel_kwargs, "fixed_config": FixedTritonConfig(dict(TWO_WAY_CAST))}
        return kernel_kwargs


def _is_two_way_cast(features: Any, tiling: Any) -> bool:
    if set(tiling) - {"r0_"} != {"x", "y"} or features.is_reduction():
        return False
    return any(
        origin.target is ops.quantize_rowcol
        for node in features.scheduler_nodes()
        for origin in node.node.get_origins()
    )


def with_tiles(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Inductor's compiler of one graph so that our heuristics hold during it, and only then."""

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(Choices(V.choices)):
            return inner_compile(*args, **kwargs)

    return compile_graph
