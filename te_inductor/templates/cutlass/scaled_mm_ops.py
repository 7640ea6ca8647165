"""CUTLASS's GEMMs that change a tensor or make several, as ops: what generated code calls them by, and what says so."""

from te_inductor.compat import constant_type_name
from te_inductor.kernels.cutlass_tiles import Tile
from te_inductor.ops.definition import define
from te_inductor.recipes import Gemm
from te_inductor.templates.cutlass import launch

add_scaled_mm = define(
    "cutlass_add_scaled_mm(Tensor(a!) total, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale,"
    f" {constant_type_name(Gemm)} g, {constant_type_name(Tile)} tile, str arch) -> ()",
    launch.add_scaled_mm,
    lambda *operands: None,
)
