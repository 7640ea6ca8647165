"""The command `te-inductor`: look at an installation, explain a model, time it, show what it loses and what
takes its memory, measure GEMMs.

This module parses arguments. What a subcommand imports, it imports when it runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODEL = "module:factory, or path/to/file.py:factory: a function without arguments that returns (model, inputs)"
ARM = "bench-arm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code. 2 is a wrong use, as by argparse; 1 what else went wrong."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _arm(given) if given[:1] == [ARM] else _parser().parse_args(given)
    if parsed.subcommand is None:
        _parser().print_help()
        return 2
    from te_inductor.errors import OptionError, RecipeError, TEInductorError

    try:
        run = import_module(f"te_inductor.command.{parsed.subcommand.replace('-', '_')}").run
        return int(run(parsed))
    except TEInductorError as error:
        print(f"te-inductor: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError | RecipeError) else 1
    except BrokenPipeError:  # of `te-inductor explain … | head`
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    from te_inductor import __version__

    parser = argparse.ArgumentParser(prog="te-inductor", description="torch.compile(model, backend='te'), looked at.")
    parser.add_argument("--version", action="version", version=f"te_inductor {__version__}")
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what runs on this machine, and what is broken")
    doctor.add_argument("--compile", action="store_true", help="compile and run a layer, too")
    doctor.add_argument("--json", action="store_true", help="data in place of text")

    explain = commands.add_parser("explain", help="say what would run where, and why not")
    _add_model(explain, "default: as the environment says, else auto")
    explain.add_argument("--target", metavar="DEVICE", help="what would run on another device, such as h100")
    explain.add_argument("--details", action="store_true", help="a row for each layer")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="data in place of text")
    form.add_argument("--html", type=_file, metavar="FILE", help="write a page, too")

    bench = commands.add_parser("bench", help="time bf16 under Inductor against recipes")
    _add_model(bench, None)
    bench.add_argument("--recipes", nargs="+", default=["current"], metavar="RECIPE", help="default: current")
    bench.add_argument("--steps", type=_positive, default=20, help="timed steps of each (default: 20)")
    bench.add_argument("--warmup", type=_positive, default=3, help="steps before (default: 3)")
    bench.add_argument("--forward", action="store_true", help="time forwards without gradients, not training steps")
    bench.add_argument("--keep-dtype", action="store_true", help="no autocast to bf16: the model's own dtypes")
    bench.add_argument("--cold", action="store_true", help="with empty compile caches, for an honest first step")
    bench.add_argument(
        "--predict", metavar="DEVICE", help="run nothing: what a device, such as h100, is expected to take"
    )
    bench.add_argument("--json", action="store_true", help="data in place of text")
    bench.add_argument("--png", type=_picture, metavar="FILE", help="write bars, too (needs matplotlib)")

    _add_memory(commands.add_parser("memory", help="name the largest tensors at the peak of a training step"))

    report = commands.add_parser("report", help="show what each layer loses by quantization")
    _add_model(report, "default: as the environment says, else auto")
    report.add_argument("--details", action="store_true", help="rows for each layer")
    report.add_argument("--json", action="store_true", help="data in place of text")
    report.add_argument("--png", type=_picture, metavar="FILE", help="write a heat map, too (needs matplotlib)")

    tune = commands.add_parser("tune", help="measure which GEMM kernels are fastest on this machine's GPU: a table")
    tune.add_argument("--folder", type=Path, metavar="DIR", help="of the table; default: what TE_INDUCTOR_TABLES says")
    tune.add_argument("--shapes", nargs="+", type=_shape, metavar="NxK", help="weights (default: those of six models)")
    tune.add_argument("--tokens", nargs="+", type=_positive, metavar="M", help="rows (default: 2048 4096 8192 16384)")
    tune.add_argument("--kinds", nargs="+", metavar="KIND", help="plain, blocks, output, another, quantized, gated")
    tune.add_argument("--rounds", type=_positive, default=5, help="in which the kernels take turns (default: 5)")

    return parser


def _add_memory(memory: argparse.ArgumentParser) -> None:
    _add_model(memory, "default: as the environment says, else auto")
    memory.add_argument("--saved", choices=("high_precision", "low_precision"), help="as the option of that name")
    memory.add_argument("--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="whose state is counted")
    memory.add_argument("--count", type=_positive, default=12, help="rows of the table (default: 12)")
    memory.add_argument("--keep-dtype", action="store_true", help="no autocast to bf16: the model's own dtypes")
    memory.add_argument("--json", action="store_true", help="data in place of text")


def _arm(given: Sequence[str]) -> argparse.Namespace:
    """Parses what `bench` starts for each recipe, which is no subcommand for people."""
    return argparse.Namespace(subcommand=ARM, settings=given[1])


def _add_model(parser: argparse.ArgumentParser, recipe: str | None) -> None:
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the factory")
    if recipe is not None:
        parser.add_argument("--recipe", help=recipe)
    parser.add_argument("--policy", type=_policy, metavar="JSON", help='such as \'{"lm_head": "none"}\'')


def _policy(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("expected an object of globs and recipes")
    return found


def _file(text: str) -> Path:
    """Checks that a file can be written before minutes of work are spent."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; expected a file in a folder that exists")
    return path


def _picture(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib; pip install matplotlib")
    return _file(text)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdigit() and k.isdigit() and int(n) and int(k)):
        raise argparse.ArgumentTypeError(f"{text!r} is no NxK, such as 14336x4096")
    return int(n), int(k)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
