"""Weights that a parametrization computes (`torch.nn.utils.parametrize`), as adapters of experts are written."""

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.module_path import held_for_one_call


def refusal(weight: fx.Node) -> Refusal | None:
    """Refuses a weight that is computed from plain attributes of a parametrization, which are no parameters and no
    buffers: so peft registers one with the factors of each call. Dynamo has compiled for the old one alone, compiles
    anew at each call, and after `recompile_limit` calls runs the code uncompiled."""
    pending, seen = [weight], {weight}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and held_for_one_call(node):
            return Refusal(
                "the weight is computed from what a parametrization holds for one call, so that each call compiles anew;"
                " with peft's target_parameters call te_inductor.integrations.peft.register() first"
            )
        inputs = [one for one in node.all_input_nodes if one not in seen]
        seen.update(inputs)
        pending += inputs
    return None
