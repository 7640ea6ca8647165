"""A weight gradient's operands, left for later: the op's eager kernel, which keeps them, in memory that nobody writes
again. Note [Weight gradients that wait] in runtime/gradients/deferred_wgrads.py."""

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler
from torch._inductor.virtualized import V

from te_inductor import ops
from te_inductor.lowerings.registry import lowering

_keep = fallback_handler(ops.defer_wgrad, add_to_fallback_set=False)


@lowering(ops.defer_wgrad)
def defer_wgrad(*operands: Any) -> None:
    known = len(V.graph.operations)
    _keep(*operands, copy=False)
    # What the kernel is called with, behind views, and copies into the layout that it asks for. Inductor's own op that
    # keeps a tensor (torch/_inductor/ir.py, SetSourceTensorKernel) says so in the same way.
    [kernel] = [operation for operation in V.graph.operations[known:] if isinstance(operation, ir.FallbackKernel)]
    V.graph.never_reuse_buffers.update(operand.get_name() for operand in kernel.inputs)  # type: ignore[union-attr]
