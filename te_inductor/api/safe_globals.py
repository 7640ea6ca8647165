"""What `torch.load(weights_only=True)` may meet in a saved model with stored weights: `import te_inductor` allows it.

A process that loads has not stored anything, so it has imported neither the class of stored weights nor their kernels.
"""

from typing import Any

import torch

from te_inductor import recipes


def rebuild(*saved: Any) -> Any:
    """A stored weight, by the function that pickles name."""
    from te_inductor.ops import stored_weight

    return stored_weight.rebuild(*saved)


def rebuild_experts(*saved: Any) -> Any:
    from te_inductor.ops import stored_experts

    return stored_experts.rebuild(*saved)


# Plain constants, and no code but these two.
torch.serialization.add_safe_globals(
    [
        (rebuild, "te_inductor.ops.stored_weight.rebuild"),
        (rebuild_experts, "te_inductor.ops.stored_experts.rebuild"),
        recipes.NVFP4WeightOnly,
        recipes.Float8CurrentScaling,
        recipes.Float8RowwiseScaling,
        recipes.Float8BlockScaling,
        recipes.Format,
        recipes.MMParams,
        recipes.QParams,
    ]
)
