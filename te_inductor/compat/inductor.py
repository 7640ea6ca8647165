"""Inductor: its entry, its autotuner, its sizes, its lowering of `cat`, how a call of FlexAttention is written into a graph,
and the C++ compiler that it calls for models on a CPU."""

import functools
import inspect
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from te_inductor.compat.patches import patch


def size_hint(sizevars: Any, size: Any) -> int:
    """A likely value of a size that Inductor knows by a symbol, without a guard."""
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint  # 2.13 renamed it
    return int(hint(size))


def autotune(name: str, choices: list[Any], nodes: list[Any], layout: Any) -> Any:
    """The result of the fastest of several choices, in Inductor's IR; from 2.13 Inductor returns the choice as well."""
    from torch._inductor.select_algorithm import autotune_select_algorithm

    found = autotune_select_algorithm(name, choices, nodes, layout)
    return found[0] if isinstance(found, tuple) else found


def concatenated(pieces: Sequence[Any], dim: int) -> Any:
    """Inductor's lowering of `aten.cat`, called by another op's: the graph's node is not the cat's."""
    from torch._inductor.lowering import lowerings

    with patch("torch._inductor.lowering._cat_inputs_recombine_reduction", lambda *_: None):
        return lowerings[torch.ops.aten.cat](pieces, dim)


def compile_fx(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    region: str | None = None,
    wrap_inner: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
) -> Any:
    """Inductor's `compile_fx`, its compiler of single graphs wrapped; 2.13 and later can name the compiled region."""
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    named: dict[str, Any] = {"compile_region_name": region} if region is not None else {}
    if named and "compile_region_name" not in inspect.signature(inductor).parameters:
        named = {}
    return inductor(gm, inputs, wrap_inner(compile_fx_inner), config_patches=dict(patches), **named)


def without_graph_cache() -> AbstractContextManager[None]:
    """AOTAutograd's cache looks up no graph, and keeps none: it can write only graphs that Inductor has compiled."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)  # type: ignore[no-any-return]


@functools.cache
def width_of_right_vectors() -> int | None:
    """The bits of a vector (`cpp.simdlen`) with which Inductor's C++ is right, or None where any are.

    GCC 12 tunes for `generic` where it does not recognise the processor. So tuned, its vectorizer of basic blocks
    (`-ftree-slp-vectorize`) compiles Inductor's transpose of 16-bit tiles (`transpose_mxn`) to wrong code where a kernel
    has two of them, with 512 bits alone: most of both results is then garbage."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    try:
        compiler = cpp_builder.get_cpp_compiler()
        isa = cpu_vec_isa.pick_vec_isa()
        if not cpp_builder.is_gcc() or not isa or isa.bit_width() < 512:
            return None
        return 256 if is_gcc_wrong(*(_output(compiler, question) for question in _QUESTIONS)) else None
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no compiler, or one that does not answer: Inductor says so where it needs one


def is_gcc_wrong(version: str, tuning: str) -> bool:
    """Tells by what GCC answers to `-dumpversion` and to `-march=native -Q --help=target`."""
    return version.split(".")[0].strip() == "12" and re.search(r"-mtune=\s+generic\b", tuning) is not None


_QUESTIONS = (("-dumpversion",), ("-march=native", "-Q", "--help=target"))


def _output(compiler: str, question: tuple[str, ...]) -> str:
    return subprocess.run([compiler, *question], capture_output=True, text=True, check=True, timeout=10).stdout


def MASK_MOD(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What stands in `flex_constants`' layout where the graph has the predicate."""
    return q >= k


def flex_constants(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], block: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The block mask as the operator `flex_attention` takes it, with `blocks` themselves and `MASK_MOD` at their places,
    the numbers of queries and of keys first; and the options of its kernel."""
    from torch.nn.attention import flex_attention

    with q.fake_mode:  # type: ignore[attr-defined]
        made: Any = flex_attention.BlockMask
        mask = made((q.shape[2], k.shape[2]), *blocks, (block, block), MASK_MOD)
        options = flex_attention._apply_kernel_options(q, k, v, True, None)
    return mask.as_tuple(), dict(options)
