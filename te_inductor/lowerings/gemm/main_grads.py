"""A weight gradient that is added to its total: by CUTLASS in the GEMM's epilogue, where the tuned table has a tile for
it, else by a kernel behind the GEMM."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings

from te_inductor import ops
from te_inductor.lowerings.gemm import cutlass_choices
from te_inductor.lowerings.gemm.scaled_mm import scaled_mm
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Gemm
from te_inductor.templates.cutlass import scaled_mm_ops

aten = torch.ops.aten
_add_scaled_mm = fallback_handler(scaled_mm_ops.add_scaled_mm, add_to_fallback_set=False)


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
