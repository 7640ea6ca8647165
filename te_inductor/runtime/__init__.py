"""What runs outside generated code: the eager kernels of the op set."""

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.runtime")
