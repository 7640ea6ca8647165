"""CUTLASS through its Python DSL (CuTe DSL) and quack's kernels; an optional extra, ``te-inductor[cutlass]``.

Kernels are built by a process of their own, into a shared library that TVM's FFI loads: a training process imports
neither CUTLASS nor quack, which takes seconds, and the build runs beside Inductor's compile."""

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.templates.cutlass")
