"""What workers of one run of pytest share: a fixture of a module runs in each of them, and again where they come back."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(temporary: Any, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name, which `make` has filled for the first of the workers that asked; the others wait.

    `temporary` is pytest's `tmp_path_factory`."""
    base = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    with (base / f"{name}.made").open("a+") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        made.seek(0)
        if not made.read():
            folder.mkdir(exist_ok=True)
            make(folder)
            made.write(name)
    return folder
