"""The kernel that runs a problem: FAMILIES are asked in turn, and the first that computes it, and pays, is taken.

To add a family: a file with a `FAMILY`, and its name in FAMILIES, before what it is faster than."""

from te_inductor.kernels import (
    autotuned,
    cublaslt,
    cutlass,
    eager,
    emulated,
    exact,
    experts_decode,
    fixed_order,
    fp8_small_m,
    grouped_library,
    grouped_mm,
    nvfp4_fp8,
    nvfp4_linear,
    recast,
    uncast,
    written_out,
)
from te_inductor.kernels.family import Choice
from te_inductor.kernels.problem import Problem

FAMILIES = (
    fixed_order.FAMILY,
    uncast.FAMILY,
    nvfp4_linear.FAMILY,
    nvfp4_fp8.FAMILY,
    recast.FAMILY,
    experts_decode.FAMILY,
    fp8_small_m.FAMILY,
    cutlass.FAMILY,
    autotuned.FAMILY,
    cublaslt.FAMILY,
    grouped_library.FAMILY,
    grouped_mm.FAMILY,
    emulated.FAMILY,
    exact.FAMILY,
    written_out.FAMILY,
    eager.FAMILY,
)


def select(problem: Problem) -> Choice:
    """The kernel for a problem. Only a choice of CUTLASS adds, computes an activation or casts in its epilogue; for a
    problem that is not plain any other says that there is no such kernel, or that it does not pay."""
    return next(choice for family in FAMILIES if (choice := family.choice(problem)) is not None)
