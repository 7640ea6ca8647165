"""CUTLASS's GEMMs that change a tensor or make several, as ops: what generated code calls them by, and what says so."""

from typing import Any

from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.ops.casts import quantize_rowcol_fake
from te_inductor.ops.definition import define
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.runtime.activation import Gating
from te_inductor.templates.cutlass import launch
from te_inductor.templates.cutlass.scaled_mm import Tile

add_scaled_mm = define(
    "cutlass_add_scaled_mm(Tensor(a!) total, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale,"
    f" {constant_type_name(Gemm)} g, {constant_type_name(Tile)} tile, str arch) -> ()",
    launch.add_scaled_mm,
    lambda *operands: None,
)


def _gated_gradient_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    gate: Tensor,
    up: Tensor,
    g: Gemm,
    gating: Gating,
    q: Quantizer,
    *_: Any,
) -> tuple[Tensor, ...]:
    return quantize_rowcol_fake(gate.new_empty((a.shape[0], 2 * b.shape[0])), q)


gated_gradient = define(
    "cutlass_gated_gradient(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor gate, Tensor up,"
    f" {constant_type_name(Gemm)} g, {constant_type_name(Gating)} gating, {constant_type_name(Quantizer)} q,"
    f" {constant_type_name(Tile)} tile, str arch) -> (Tensor, Tensor, Tensor, Tensor)",
    launch.gated_gradient,
    _gated_gradient_fake,
)
