"""Whether CUTLASS can be used here: the packages of the extra ``te-inductor[cutlass]``. None of them is imported."""

import functools
from importlib import metadata

# What a built kernel depends on. quack's epilogue functions are no stable interface: one minor version.
REQUIRED = {"nvidia-cutlass-dsl": ">=4.8, <5", "quack-kernels": ">=0.6.5, <0.7", "apache-tvm-ffi": ">=0.1.6, <0.2"}


@functools.cache
def missing() -> str | None:
    """Why CUTLASS cannot be used here, None where it can. Imports nothing of it."""
    for name, accepted in REQUIRED.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed; pip install 'te-inductor[cutlass]'"
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(accepted).contains(found, prereleases=True):
            return f"{name} {found} is installed, expected {accepted}; pip install 'te-inductor[cutlass]'"
    return None


@functools.cache
def identity() -> tuple[str, ...]:
    """The identity for the keys of generated code, which calls its kernels where it is installed."""
    return (missing() or "", *(f"{name} {metadata.version(name)}" for name in REQUIRED if missing() is None))


def versions() -> tuple[str, ...]:
    """The versions for the keys of built kernels."""
    return tuple(f"{name} {metadata.version(name)} {metadata.distribution(name).locate_file('')}" for name in REQUIRED)
