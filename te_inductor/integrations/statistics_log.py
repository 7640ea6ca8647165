"""Statistics of a run, written while it trains: lines of JSON, and scalars for TensorBoard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from te_inductor.api.statistics import statistics
from te_inductor.errors import OptionError
from te_inductor.presentation.statistics import Statistics


@dataclass
class StatisticsLog:
    """Writes `te_inductor.statistics` of a model each `every` steps. Between these it reads nothing, and waits for no
    device.

        log = StatisticsLog("statistics.jsonl", board=SummaryWriter("runs/1"), every=100)
        log.note(compiled, step)  # behind each step; callbacks of frameworks do so

    A line of the file has the `step` and the `slots` of `Statistics.to_dict()`. Boards get the numbers of
    `Statistics.scalars()` as ``te_inductor/layers.0.up/input/amax``.

    Raises:
        OptionError: there is neither a file nor a board, or `every` is below 1.
    """

    path: str | Path | None = None
    board: Any = None  # what has `add_scalar(name, value, step)`, as TensorBoard's SummaryWriter
    every: int = 100  # steps
    batch: Sequence[Any] | Mapping[str, Any] | None = None  # a sample each time, which costs a step in high precision
    options: Mapping[str, Any] | None = None  # of the compile, for a sample of a model that a framework compiles
    _last: int | None = None

    def __post_init__(self) -> None:
        if self.path is None and self.board is None:
            raise OptionError("StatisticsLog has neither a path nor a board, expected one of them to write to")
        if self.every < 1:
            raise OptionError(f"StatisticsLog.every is {self.every}, expected 1 or more steps")

    def note(self, model: nn.Module, step: int, writes: bool = True) -> Statistics | None:
        """Called behind a step, on each rank where there is a batch, as a sample runs the model. Of several calls in one
        step the first counts; `writes` is for one rank. Returns the statistics in a step that has them."""
        if step % self.every or step == self._last or not (writes or self.batch is not None):
            return None
        self._last = step
        args, kwargs = ((), self.batch) if isinstance(self.batch, Mapping) else (self.batch or (), {})
        found = statistics(model, *args, options=self.options, **kwargs)
        if writes:
            self._write(found, step)
        return found

    def _write(self, found: Statistics, step: int) -> None:
        if self.path is not None:
            with Path(self.path).open("a") as file:
                file.write(json.dumps({"step": step, **found.to_dict()}) + "\n")
        for name, value in found.scalars().items() if self.board is not None else ():
            self.board.add_scalar(f"te_inductor/{name}", value, step)
