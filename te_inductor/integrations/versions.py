"""The frameworks that an integration reaches into, and the oldest version of each that is known to work."""

from importlib import metadata

MINIMUM = {
    "accelerate": "1.10.0",
    "lightning": "2.4.0",
    "peft": "0.21.0",
    "torchtitan": "0.3.0",
    "transformers": "5.17.0",
}


def require(package: str) -> None:
    """Called by an integration when it is imported.

    Raises:
        ImportError: the package is not installed, or older than `MINIMUM` says.
    """
    minimum = MINIMUM[package]
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed, expected {minimum} or later; pip install {package}") from None
    if _numbers(found) < _numbers(minimum):
        raise ImportError(
            f"{package} is {found}, expected {minimum} or later; upgrade it, or compile the model before the framework"
            ' has it: model.compile(backend="te")'
        )


def _numbers(version: str) -> tuple[int, ...]:
    """(5, 17) of 5.17.0.dev0: a minor version tells, and what follows it may be no number."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])
