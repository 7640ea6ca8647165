"""What runs beside generated code: the op set on real tensors, and the inputs that a call adds to a compiled graph."""

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.runtime")
