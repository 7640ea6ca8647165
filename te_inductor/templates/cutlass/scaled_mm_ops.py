"""CUTLASS's GEMMs that change a tensor or make several, as ops: what generated code calls them by, and what says so."""

from te_inductor.runtime.definition import op_of
from te_inductor.templates.cutlass import launch

add_scaled_mm = op_of(launch.add_scaled_mm, lambda *operands: None, name="cutlass_add_scaled_mm")
