"""Kernels that Inductor cannot write as well itself: Triton and CUTLASS (CuTe DSL) templates."""

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.templates")
