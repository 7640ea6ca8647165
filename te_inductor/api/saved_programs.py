"""What saved models, saved programs and compiled code may ask for in a process that has only imported te_inductor: the
classes of stored weights, ops by their names in `torch.ops.te_inductor`, and lowerings where AOTInductor traces one.

Ops are defined when the first of them is asked for, as it takes longer to define them than to import all else. torch's
namespace of ops is a module, and so has its `__getattr__`, which Python calls before torch looks for the op."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from te_inductor import compat, recipes

_HOMES = dict.fromkeys(("enter_region", "exit_region"), "te_inductor.recipes.regions")


def _define(name: str) -> Any:
    """Have an op defined, in a thread that comes second behind the first one's import, and leave it to torch to find."""
    if not name.startswith("__"):
        import_module(_HOMES.get(name, "te_inductor.ops"))
    raise AttributeError(name)


@functools.cache
def _install() -> None:
    from te_inductor import lowerings

    lowerings.install()


vars(torch.ops.te_inductor)["__getattr__"] = _define
# AOTInductor compiles programs without our backend, whose first compile would register them.
compat.before_lowering.append(_install)


def _rebuilder(module: str) -> tuple[Callable[..., Any], str]:
    """What stands for the function by which a stored weight is pickled, and its name."""
    return lambda *saved: import_module(module).rebuild(*saved), f"{module}.rebuild"


# What `torch.load(weights_only=True)` may meet in a saved model: plain constants, and no code but these two. A process that
# loads has not stored anything, so it has imported neither the class of stored weights nor their kernels.
torch.serialization.add_safe_globals(
    [
        _rebuilder("te_inductor.ops.stored_weight"),
        _rebuilder("te_inductor.ops.stored_experts"),
        recipes.NVFP4WeightOnly,
        recipes.Float8CurrentScaling,
        recipes.Float8RowwiseScaling,
        recipes.Float8BlockScaling,
        recipes.Format,
        recipes.MMParams,
        recipes.QParams,
    ]
)
