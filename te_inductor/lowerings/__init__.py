"""Inductor lowerings of the op set: IR only, one file an op. `install()` registers them, once a process."""

if not __name__.startswith("te_inductor."):
    raise ImportError(f"{__name__!r} is a folder of te_inductor, import te_inductor.lowerings")


def install() -> None:
    """Register every lowering with Inductor; importing the modules does it."""
    from te_inductor.lowerings import quantize, scaled_mm  # noqa: F401
