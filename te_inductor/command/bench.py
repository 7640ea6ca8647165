"""`te-inductor bench`: a model's step under Inductor in bf16, and under recipes. Each arm is a process of its own."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import te_inductor
from te_inductor.command.factory import options_of
from te_inductor.errors import TEInductorError
from te_inductor.presentation.progress import progress
from te_inductor.presentation.tables import Column, digits, tabulated
from te_inductor.recipes import resolve

BASE = "inductor"
# What the Makefile sets for its own runs: threads that wait for each other sleep, and modules are compiled once. Spinning
# threads of an arm that shares its cores with anything else make steps of tens of milliseconds take ten times as long.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
_UNSET = ("PYTHONDONTWRITEBYTECODE",)
_FEWEST = 4  # steps that have quartiles
_COLUMNS = (
    Column("arm"),
    Column("step ms", right=True),
    Column("quartiles", right=True, optional=True),
    Column("speed-up", right=True),
    Column("peak MiB", right=True),
    Column("first step s", right=True),
    Column("loss", right=True),
    Column("difference", right=True),
    Column("gradient norm", right=True, optional=True),
)


class BenchError(TEInductorError, RuntimeError):
    """An arm failed; the text ends with what its process wrote last."""


def run(arguments: argparse.Namespace) -> int:
    """Time all arms, and print, write and draw what they took."""
    for recipe in arguments.recipes:  # before the first arm, which takes a while
        resolve(recipe)
    if arguments.predict is not None:
        from te_inductor.command import predict

        return predict.run(arguments)
    arms = [(BASE, None), *((recipe, recipe) for recipe in dict.fromkeys(arguments.recipes))]
    with progress(len(arms) * (arguments.steps + arguments.warmup), "bench") as advance:
        found = [_arm(name, recipe, arguments, advance) for name, recipe in arms]
    for one in found:
        one["quartiles_ms"] = quartiles(one["steps_ms"])
        one["doubt"] = None if one is found[0] else doubt(found[0], one)
    if arguments.json:
        print(json.dumps({"arms": found, "te_inductor": te_inductor.__version__}, indent=1))
    else:
        print(_headline(found, arguments))
        print()
        print(tabulated(_COLUMNS, list(_rows(found))))
        print()
        for text in filter(None, (one["doubt"] for one in found)):
            print(text)
        print(_CAPTION.format(device=found[0]["device"]))
    if arguments.png is not None:
        _draw(found, _headline(found, arguments), arguments.png)
        if not arguments.json:
            print(f"wrote {arguments.png}")
    return 0


_CAPTION = (
    "step: the median, and quartiles of all timed steps. first step, on {device}: compiles, from caches where these have\n"
    "the graph (--cold: never). loss and gradient norm: of the first step, all arms having the same weights and inputs;\n"
    "difference: from inductor's loss."
)


def quartiles(times: Sequence[float]) -> tuple[float, float] | None:
    """The first and the third quartile; None of too few times."""
    if len(times) < _FEWEST:
        return None
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def doubt(base: Any, one: Any) -> str | None:
    """Why an arm's step cannot be told from the base's: quartiles lie further apart than the two medians. None where it
    can."""
    spreads = [quartiles(arm["steps_ms"]) for arm in (base, one)]
    difference = abs(base["step_ms"] - one["step_ms"])
    if None in spreads:
        return f"{one['arm']}: fewer than {_FEWEST} timed steps say nothing of their spread; pass --steps"
    widest = max(third - first for first, third in spreads)  # type: ignore[misc]
    if difference > widest:
        return None
    return (
        f"{one['arm']}: {difference:.3g} ms from {base['arm']}, which is within the spread: quartiles are {widest:.3g} ms"
        " apart. Take more --steps, or a machine that does nothing else"
    )


def _arm(name: str, recipe: str | None, arguments: argparse.Namespace, advance: Callable[..., None]) -> Any:
    if not sys.stderr.isatty():
        print(f"{name} …", file=sys.stderr, flush=True)
    options = options_of(recipe, arguments.policy) if recipe is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        settings = {
            "model": arguments.model,
            "set": arguments.set,
            "backend": BASE if recipe is None else "te",
            "options": options,
            "steps": arguments.steps,
            "warmup": arguments.warmup,
            "forward": arguments.forward,
            "autocast": not arguments.keep_dtype,
            "result": str(result),
        }
        path = os.pathsep.join(filter(None, (str(Path(te_inductor.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**_ENVIRONMENT, **os.environ, "PYTHONPATH": path}
        for name_of_variable in _UNSET:
            environment.pop(name_of_variable, None)
        if arguments.cold:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        command = [sys.executable, "-m", "te_inductor", "bench-arm", json.dumps(settings)]
        with Path(folder, "stderr").open("w+") as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step "):
                    advance(name)
            if process.wait() or not result.exists():
                errors.seek(0)
                tail = "\n".join(errors.read().strip().splitlines()[-12:])
                raise BenchError(f"arm {name!r} failed with exit code {process.returncode}:\n{tail}")
        return {"arm": name, **json.loads(result.read_text())}


def _headline(found: Sequence[Any], arguments: argparse.Namespace) -> str:
    first = found[0]
    what = "forward" if first["forward"] else "forward and backward"
    return f"{arguments.model}: {what}, {first['dtype']}, {first['device']}, torch {first['torch']}"


def _rows(found: Sequence[Any]) -> Any:
    base = found[0]
    for one in found:
        yield (
            one["arm"],
            f"{one['step_ms']:.2f}",
            "" if (spread := quartiles(one["steps_ms"])) is None else f"{spread[0]:.2f} to {spread[1]:.2f}",
            f"{base['step_ms'] / one['step_ms']:.2f}",
            f"{one['peak_bytes'] / 2**20:.0f}",
            f"{one['first_s']:.1f}",
            "-" if one["loss"] is None else f"{one['loss']:.4f}",
            "-" if one["loss"] is None else f"{_apart(one['loss'], base['loss']):+.2%}",
            "-" if one["gradient_norm"] is None else f"{_apart(one['gradient_norm'], base['gradient_norm']):+.2%}",
        )


def _apart(value: float, base: float) -> float:
    return value / base - 1 if base else float("nan")


def _draw(found: Sequence[Any], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.45 * len(found)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    names = [one["arm"] for one in found]
    panels = {
        "step (ms)": [one["step_ms"] for one in found],
        "peak memory (MiB)": [one["peak_bytes"] / 2**20 for one in found],
        "first step (s)": [one["first_s"] for one in found],
    }
    for axes, (label, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        drawn = axes.barh(names, values, color=["#999999", *["#4477aa"] * (len(found) - 1)])
        axes.bar_label(drawn, [digits(value) for value in values], padding=3)
        axes.set_xlabel(label)
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # shared
    figure.savefig(path, dpi=130)
