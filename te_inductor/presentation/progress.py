"""How far a task of minutes is, where errors go, if that is a terminal; nothing anywhere else."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SOON = 1.0  # seconds in which a task shows nothing
_LONG = 10.0  # seconds behind which a compile is said to take long


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[..., None]]:
    """A bar of `total` steps. Gives a function that is called behind each step, or behind `steps` of them, with what is
    at work by then. A terminal gets the bar once the task has taken a second."""
    if not _is_seen():
        yield lambda description=None, steps=1: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)
    soon = threading.Timer(_SOON, bar.start)
    soon.daemon = True
    soon.start()

    def advance(description: str | None = None, steps: int = 1) -> None:
        bar.update(task, advance=steps, description=description)

    try:
        yield advance
    finally:
        soon.cancel()
        soon.join()
        bar.stop()


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Says, once, of what takes more than ten seconds that it is at work."""
    if not _is_seen():
        yield
        return
    late = threading.Timer(_LONG, lambda: print(f"te_inductor: {what} …", file=sys.stderr, flush=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _is_seen() -> bool:
    """Whether errors go to a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
