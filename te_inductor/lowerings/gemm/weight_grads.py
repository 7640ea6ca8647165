"""Weight gradients that go to no autograd. One that is added to its total is by CUTLASS in the GEMM's epilogue, where the
tuned table has a tile for it, else by a kernel behind the GEMM. The operands of one that waits are left for later: the
op's eager kernel keeps them, in memory that nobody writes again (Note [Weight gradients that wait] in
runtime/gradients/deferred_wgrads.py)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from te_inductor import ops
from te_inductor.lowerings.gemm import cutlass_choices
from te_inductor.lowerings.gemm.scaled_mm import scaled_mm
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Gemm
from te_inductor.runtime.definition import op_of
from te_inductor.templates.cutlass import launch

aten = torch.ops.aten
# What generated code calls CUTLASS's GEMMs by that change a tensor.
_add_scaled_mm = fallback_handler(
    op_of(launch.add_scaled_mm, lambda *operands: None, name="cutlass_add_scaled_mm"), add_to_fallback_set=False
)
_keep = fallback_handler(ops.defer_wgrad, add_to_fallback_set=False)


@lowering(ops.accumulate_wgrad)
def accumulate_wgrad(
    totals: Sequence[ir.TensorBox],  # fp32, (N, K) of each weight
    a: ir.TensorBox,  # dy columnwise, (all N, M)
    a_scale: ir.TensorBox,
    b: ir.TensorBox,  # x columnwise, (K, M)
    b_scale: ir.TensorBox,
    alpha: ir.TensorBox | None,  # ()
    gemm: Gemm,
) -> None:
    """Adds wgrad to totals. Of several weights each has a GEMM of its own, as each total lies somewhere else; one GEMM
    where no epilogue adds."""
    choices = [cutlass_choices.accumulating(total, a, b, gemm) for total in totals]
    if not any(choices):
        dw = scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.float32, alpha)
        for total, gradient in zip(totals, _rows(dw, totals), strict=True):
            lowerings[aten.add_](total, gradient)
        return
    a_pieces, scale_pieces = (_rows(ir.ExternKernel.require_contiguous(x), totals) for x in (a, a_scale))
    columns = [ir.ExternKernel.require_contiguous(x) for x in (b, b_scale)]
    for total, chosen, *rows in zip(totals, choices, a_pieces, scale_pieces, strict=True):
        if chosen is None:
            lowerings[aten.add_](total, scaled_mm(*rows, *columns, None, gemm, torch.float32, alpha))
        else:
            _add_scaled_mm(total, *rows, *columns, gemm, *chosen)


def _rows(x: Any, totals: Sequence[ir.TensorBox]) -> Iterator[ir.TensorBox]:
    """The rows of each weight; where there is one scale for all, that scale."""
    start = 0
    for total in totals:
        end = start + total.get_size()[0]
        yield lowerings[aten.slice](x, 0, start, end) if x.get_size() and len(totals) > 1 else x
        start = end


@lowering(ops.defer_wgrad)
def defer_wgrad(*operands: Any) -> None:
    known = len(V.graph.operations)
    _keep(*operands, copy=False)
    # What the kernel is called with, behind views, and copies into the layout that it asks for. Inductor's own op that
    # keeps a tensor (torch/_inductor/ir.py, SetSourceTensorKernel) says so in the same way.
    [kernel] = [operation for operation in V.graph.operations[known:] if isinstance(operation, ir.FallbackKernel)]
    V.graph.never_reuse_buffers.update(operand.get_name() for operand in kernel.inputs)  # type: ignore[union-attr]
