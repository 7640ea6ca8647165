"""torchtitan's GraphTrainer, which traces a step as one graph and compiles it by a pipeline of passes, not by a backend.

Sources: torchtitan 0.3, experiments/graph_trainer: trainer.py (what calls the pipeline), make_fx_tracer.py (a DTensor is
opened into several inputs), memory_policy.py (what a backward computes again)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from te_inductor import ops
from te_inductor.api.lowering import lower
from te_inductor.integrations.versions import parts_of

with parts_of("torchtitan"):
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import (
        MEMORY_POLICY_REGISTRY,
        register_memory_policy,
        register_pass_pipeline,
    )

_PRODUCTS = frozenset((ops.scaled_mm, ops.grouped_mm, ops.scaled_grouped_mm))


def register(options: Mapping[str, Any] | None = None, name: str = "te") -> None:
    """Make a pipeline of passes known to GraphTrainer: low precision first, then torchtitan's default passes. And a
    memory policy of the same name, which saves low-precision products where torchtitan's default saves products.

    Args:
        options: `recipe`, `policy` and `fallback`, as `te_inductor.lower` takes them.
        name: what `pass_pipeline` and `memory_policy` of a GraphTrainerCompileConfig are to be.

    Raises:
        ImportError: torchtitan is not installed, or older than version 0.3 (when this module is imported).
    """

    def pipeline(traced: Any, config: Any, **given: Any) -> list[Callable[..., fx.GraphModule]]:
        def low_precision_pass(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
            return lower(gm, options, parameters=parameters_of(traced))

        return [low_precision_pass, *construct_default_graph_passes(traced, config, **given)]

    register_pass_pipeline(name)(pipeline)
    register_memory_policy(name)(_save_products)


def parameters_of(traced: Any) -> dict[str, str]:
    """Names of a traced step's parameters and buffers by the placeholders of their tensors, of DTensors the local
    ones: `parameters` of `te_inductor.lower`. `traced` is GraphTrainer's TracedResult, before any pass."""
    inputs = traced.gm.graph.find_nodes(op="placeholder")
    found, place = {}, 0
    for number, name in enumerate(traced.state_fqns):
        found[inputs[place].name] = name
        layout = traced.input_subclass_layouts.get(number)
        place += 1 if layout is None else layout.num_tensors
    return found


def _save_products(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
    gm = MEMORY_POLICY_REGISTRY["default"](gm, config=config)
    for node in gm.graph.nodes:
        if node.target in _PRODUCTS and "recompute" in node.meta:  # which nodes of a backward have not
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm
