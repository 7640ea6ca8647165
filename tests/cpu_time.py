"""A plugin of pytest that lists tests and files by the processor time that they take, that of their processes included:

    python -m pytest -p tests.cpu_time --costs 20 ...

Processor time is nearly the same on a busy machine, so that figures of several runs can be compared. What a process
imports, starts or compiles for several tests is counted as the first one's."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def _of_children() -> float:
    """The processor time of the processes below this one, also of those that have ended."""
    ended = os.times()
    total, parents = ended.children_user + ended.children_system, [os.getpid()]
    while parents:
        try:
            tasks = list(Path(f"/proc/{parents.pop()}/task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
            times = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15] for child in children]
        except OSError:  # one of them has just ended, and is counted with its parent's
            continue
        total += sum(int(ticks) for fields in times for ticks in fields) / TICKS
        parents += children
    return total


class Costs:
    """Adds up the processor time of each test: of its fixtures, its call and their end."""

    def __init__(self, shown: int) -> None:
        self.shown, self.until_now = shown, 0.0
        self.of_tests: Counter[str] = Counter()

    def _since_the_last(self) -> float:
        before, self.until_now = self.until_now, time.process_time() + _of_children()
        return self.until_now - before

    def pytest_collection_finish(self) -> None:
        self._since_the_last()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        report.processor_time = self._since_the_last()  # which a worker of pytest-xdist sends with it
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.of_tests[report.nodeid] += getattr(report, "processor_time", 0.0)  # which none of a lost worker has

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of_files: Counter[str] = Counter()
        for test, seconds in self.of_tests.items():
            of_files[test.partition("::")[0]] += seconds
        for title, costs in ("tests", self.of_tests), ("files", of_files):
            terminalreporter.section(f"{title} by processor time, {sum(costs.values()):.0f} s in all")
            for name, seconds in costs.most_common(self.shown):
                terminalreporter.write_line(f"{seconds:8.2f} {name}")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--costs", type=int, default=100, help="how many tests and files to list by their processor time")


def pytest_configure(config: Any) -> None:
    os.environ.pop(
        "PYTEST_XDIST_TESTRUNUID", None
    )  # workers share no server of programs, whose time would be another's
    config.pluginmanager.register(Costs(config.getoption("--costs")))
