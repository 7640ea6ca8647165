"""Graphs as AOTAutograd and our joint pass made them, each op by its eager kernel: without seconds of C++ a graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx


def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], *_: Any) -> Callable[..., Any]:
    """In the place of `te_inductor.compat.compile_fx`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        patches["joint_custom_pre_pass"](joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiler(gm, inputs)
