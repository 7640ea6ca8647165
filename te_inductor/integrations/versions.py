"""The frameworks that an integration reaches into, and the oldest version of each that is known to work."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.version import Version

MINIMUM = {
    "accelerate": "1.10.0",
    "lightning": "2.4.0",
    "peft": "0.21.0",
    "torchtitan": "0.3.0",
    "transformers": "5.17.0",
}

_REMEDY = 'compile the model before the framework has it, model.compile(backend="te")'
_REMEDIES = {"peft": "give LoraConfig target_modules in place of target_parameters"}


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
    if Version(found).release[:2] < Version(minimum).release[:2]:  # a minor version tells, also of 5.17.0.dev0
        raise ImportError(
            f"{package} is {found}, expected {minimum} or later; upgrade it, or compile the model before the framework"
            ' has it: model.compile(backend="te")'
        )


@contextmanager
def parts_of(package: str) -> Iterator[None]:
    """Wraps the imports of what an integration uses of a package.

    Raises:
        ImportError: as `require`, or the package has no longer what the one that is known had.
    """
    require(package)
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{package} {metadata.version(package)} lacks a part that version {MINIMUM[package]} has ({error}), expected a"
            f" version between that and this; until te_inductor knows this one: {_REMEDIES.get(package, _REMEDY)}"
        ) from error
