"""Stand-ins for `te_inductor.compat.compile_fx`, which run each op by its eager kernel, without seconds of C++ a graph:
graphs as AOTAutograd and our joint pass made them, or Dynamo's as our first passes rewrote them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import fx

from te_inductor.passes.graph.interpreted import Interpreted


def compile_fx(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    *_: Any,
    see: Callable[[fx.Graph], None] = lambda graph: None,
    around: Callable[[Any], Any] = lambda compiler: compiler,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Stands in the place of `te_inductor.compat.compile_fx`; `see` is shown the forward's graph and the backward's, and
    `around` makes another compiler of the one that runs them. With Inductor's `decompositions` these are made of the
    operators that passes know. Modules of graphs write their code when it is asked for, as under Inductor."""
    from torch._dynamo import config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for place in ("joint_custom_pre_pass", "joint_custom_post_pass"):
            if (ours := patches.get(place)) is not None:
                ours(joint.graph)
        return (patches.get("custom_partitioner_fn") or min_cut_rematerialization_partition)(joint, *args, **kwargs)

    def boxed(graph: fx.GraphModule, _: Any) -> Any:
        see(graph.graph)
        return Interpreted(graph)

    compiler = aot_autograd(
        fw_compiler=around(boxed),
        partition_fn=partition,
        keep_inference_input_mutations=True,
        decompositions=decompositions,
    )
    with _use_lazy_graph_module(config.use_lazy_graph_module):
        return compiler(gm, inputs)


def run_rewritten(gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
    """Runs Dynamo's graph as it is, and the backward by autograd: for tests of what comes before AOTAutograd."""
    gm.recompile()
    return gm.forward


def patched(uncompiled: bool = True) -> Any:
    """A context in which graphs are not compiled, or, for programs that run either way, one that changes nothing."""
    from te_inductor import compat

    return mock.patch.object(compat, "compile_fx", compile_fx if uncompiled else compat.compile_fx)
