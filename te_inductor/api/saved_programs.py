"""What `torch.export.load` may meet in a saved program: `import te_inductor` defines the ops, and has their lowerings
registered when AOTInductor traces one. Nothing of Inductor is imported before."""

import functools

from te_inductor.ops import stored, written_out  # noqa: F401 (the first defines stored weights' ops)


@functools.cache
def _install() -> None:
    from te_inductor import lowerings

    lowerings.install()


# AOTInductor compiles programs without our backend, whose first compile would register them.
written_out.before_export.append(_install)
