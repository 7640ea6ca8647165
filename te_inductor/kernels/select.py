"""The kernel that runs a problem: FAMILIES are asked in turn, and the first that computes it, and pays, is taken.

To add a family: a `KernelFamily`, in a file of its own where it has a kernel, and its name in FAMILIES, before what it is
faster than."""

from te_inductor.kernels import (
    cublaslt,
    cutlass,
    experts_decode,
    fixed_order,
    fp8_small_m,
    grouped_mm,
    nvfp4_fp8,
    nvfp4_linear,
    plain,
)
from te_inductor.kernels.family import Choice
from te_inductor.kernels.problem import Problem

FAMILIES = (
    fixed_order.FAMILY,
    plain.UNCAST,
    nvfp4_linear.FAMILY,
    nvfp4_fp8.FAMILY,
    cublaslt.RECAST,
    experts_decode.FAMILY,
    fp8_small_m.FAMILY,
    cutlass.FAMILY,
    cublaslt.AUTOTUNED,
    cublaslt.FAMILY,
    grouped_mm.LIBRARY,
    grouped_mm.FAMILY,
    plain.EMULATED,
    plain.EXACT,
    cublaslt.WRITTEN_OUT,
    plain.EAGER,
)


def select(problem: Problem) -> Choice:
    """The kernel for a problem. Only a choice of CUTLASS adds, computes an activation or casts in its epilogue; for a
    problem that is not plain any other says that there is no such kernel, or that it does not pay."""
    return next(choice for family in FAMILIES if (choice := family.choice(problem)) is not None)
