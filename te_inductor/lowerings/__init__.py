"""Inductor lowerings of the op set: IR only, one file an op. `install()` registers them, once a process."""

from collections.abc import Callable
from typing import Any

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.lowerings")


def install(fallback: str = "warn", rows_alone: bool = False) -> Callable[..., Callable[..., Any]]:
    """Register every lowering with Inductor, and the FLOPs of ops with torch (importing the modules does it).

    Returns a wrapper for Inductor's compiler of one graph, of a forward, a backward or an inference: during the
    compile, and only then, our tiles (`choices.choices`), our kernel class and `few_rows` hold; after it,
    lowerings that failed are named as `fallback` says."""
    import torch
    from torch._inductor.virtualized import V
    from torch.utils._triton import has_triton_package

    from te_inductor.compat.indexing import joining_dimensions_fast
    from te_inductor.lowerings import decode, permutations  # noqa: F401
    from te_inductor.lowerings.casts import experts, quantize  # noqa: F401
    from te_inductor.lowerings.choices import choices
    from te_inductor.lowerings.codegen.combos import combined_without_ours
    from te_inductor.lowerings.codegen.direct_calls import called_directly, constants_named
    from te_inductor.lowerings.codegen.known_launches import launches_known
    from te_inductor.lowerings.codegen.programmatic_launch import launched_early
    from te_inductor.lowerings.gemm import nvfp4_linear, scaled_mm, weight_grads  # noqa: F401
    from te_inductor.lowerings.registry import compile_guarded

    if torch.cuda.is_available() and has_triton_package():
        # Ops that generated code calls, also such as a compile cache returns. NVFP4's come with its weights.
        from te_inductor.templates.triton import (  # noqa: F401
            decode_attention,
            fixed_order,
            fp8_small_m,
            grouped_ops,
            scale_updates,
            token_losses,
        )

    def wrap(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
        def compile_graph(*args: Any, **kwargs: Any) -> Any:
            with (
                launched_early(),
                combined_without_ours(),
                decode.replaced(),
                joining_dimensions_fast(),
                called_directly(),
                constants_named(),
                launches_known(),
                V.set_choices_handler(choices(V.choices, rows_alone)),
            ):
                return compile_guarded(inner_compile, fallback, *args, **kwargs)

        return compile_graph

    return wrap
