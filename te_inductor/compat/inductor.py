"""Inductor: its entry, AOTAutograd's partitioner under an activation memory budget, its autotuner, its sizes, its lowering
of `cat`, how a call of FlexAttention is written into a graph, and the C++ compiler that it calls for models on a CPU."""

import functools
import inspect
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

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
    """AOTAutograd's cache looks up no graph, and keeps none."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)  # type: ignore[no-any-return]


def keeping_whole_graphs(whole: bool = True) -> AbstractContextManager[None]:
    """AOTAutograd's cache keeps what a compiler returned, of any class of `OutputCode`, the backward beside the forward,
    with which it is compiled for that; or, as a rule, the keys by which Inductor's own cache has both."""
    from torch._functorch import config

    if not whole:
        return config.patch(bundled_autograd_cache=False)  # type: ignore[no-any-return]
    return config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def miss_graph_cache() -> NoReturn:
    """Has AOTAutograd go on as if its cache did not have the graph that it has found."""
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

    raise FXGraphCacheMiss


def bypass_graph_cache(reason: Exception) -> NoReturn:
    """Has AOTAutograd's cache not keep the graph that it is about to write."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    raise BypassAOTAutogradCache(str(reason)) from reason


def keep_out_of_graph_cache(code: Any, reason: str) -> None:
    """Has AOTAutograd's cache not keep the graph that a compiler returned, whether it would keep all of it, or the key by
    which Inductor's cache has the code."""

    class Unkept(type(code)):  # type: ignore[misc]
        def prepare_for_serialization(self) -> None:
            """Called of a copy, before anything of it is written: kernels may be loaded, and could not be. The end of
            the copy would take from the code's runner what it runs, as its parts under CUDA graphs."""
            self.compiled_fn_runner = None
            bypass_graph_cache(ValueError(reason))

    # Inductor's cache has nothing under this key, and that is a miss. Without a key torch 2.11 fails in the backward.
    code._fx_graph_cache_key, code.__class__ = "te_inductor_unkept", Unkept


@functools.cache
def width_of_right_vectors() -> int | None:
    """The bits of a vector (`cpp.simdlen`) with which Inductor's C++ is right, or None where any are.

    GCC 12 tunes for `generic` where it does not recognise the processor. So tuned, its vectorizer of basic blocks
    (`-ftree-slp-vectorize`) compiles Inductor's transpose of 16-bit tiles (`transpose_mxn`) to wrong code where a kernel
    has two of them, with 512 bits alone: most of both results is then garbage."""
    from torch._inductor import config, cpp_builder

    # Inductor itself tries whether a vector's code compiles and loads, in a process that imports torch.
    if config.cpp.simdlen not in (None, 512) or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        compiler = cpp_builder.get_cpp_compiler()
        wrong = cpp_builder.is_gcc() and is_gcc_wrong(*(_output(compiler, question) for question in _QUESTIONS))
        return 256 if wrong else None
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


def let_marks_be_saved(joint_graph: torch.fx.Graph) -> None:
    """What an activation memory budget wants of a graph in which something is marked as MUST_SAVE. Before 2.15 torch
    saves nothing but inputs under 0, not even that: the least budget stands in for it. A region's (from 2.13) has to be
    on every node of the forward, and is not on those by which AOTAutograd writes state back."""
    from torch._functorch import config

    least, region = 1e-9, "_region_activation_memory_budget"  # torch.fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY
    budgets = {node.meta.get("custom", {}).get(region) for node in joint_graph.nodes} - {None}
    for node in joint_graph.nodes:
        if config.activation_memory_budget == 0:
            node.meta["memory_budget"] = least
        custom = node.meta.get("custom", {})
        written = node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
        if len(budgets) == 1 and (region in custom or written):
            node.meta["custom"] = {**custom, region: max(*budgets, least)}


@contextmanager
def saving_a_minimum_cut() -> Iterator[None]:
    """Have torch's partitioner save one of its minimum cuts under every budget between 0 and 1: of a list that is
    marked as MUST_SAVE its tensors. Before 2.14, where a graph leaves nothing to weigh, it saves inputs and marked
    nodes as they are, a list as such, or, where an input is a size, not at all (pytorch/pytorch#188014). The last cut
    is what 2.14 saves."""
    from torch._functorch import partitioners

    choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut

    def choose_a_cut(*args: Any, **kwargs: Any) -> list[fx.Node]:
        cuts: list[list[fx.Node]] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = cut(*args, **kwargs)
            cuts.append(found[0])
            return found

        with patch("torch._functorch.partitioners.solve_min_cut", recorded):
            chosen = choose(*args, **kwargs)
        return chosen if not cuts or any(chosen is one for one in cuts) else cuts[-1]

    with patch("torch._functorch.partitioners.choose_saved_values_set", choose_a_cut):
        yield
