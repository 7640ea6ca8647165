"""Runs the programs of this folder one after the other, each as a user starts it, and holds each to what it promises:

    python -m examples.run_all --folder out/programs

prints a line a program, and exits with 1 where one fails. On a GPU they have some layers of Llama-3.2-1B's shape, on a
CPU tiny ones. A program whose framework is not installed is left out, and so are several ranks on one GPU."""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

APART = 2e-3  # of a loss: how far a run that goes on may be on a GPU, where attention adds in any order
FORCED = {"TE_INDUCTOR_POLICY": '{"*": "delayed"}'}  # for tiny models, which gain nothing on a GPU


class Failed(Exception):
    """What a program did not do."""


@dataclass(frozen=True)
class Program:
    """Commands behind `python -m examples.`, and a check of what each printed, which returns a line."""

    name: str
    commands: Sequence[str]
    check: Callable[[list[str]], str]
    packages: Sequence[str] = ()
    ranks: int | None = None  # of torchrun
    environment: dict[str, str] | None = None


def losses(output: str) -> list[float]:
    """The last list of numbers that a program printed."""
    lists = [line for line in output.splitlines() if re.fullmatch(r"\[[-\d.e, ]+\]", line)]
    if not lists:
        raise Failed("printed no losses")
    return [float(value) for value in ast.literal_eval(lists[-1])]


def falls(outputs: list[str]) -> str:
    """The loss of the first command falls."""
    found = losses(outputs[0])
    half = max(1, len(found) // 2)
    first, last = sum(found[:half]) / half, sum(found[-half:]) / half
    if not last < first:
        raise Failed(f"the loss does not fall: {found}")
    return f"loss {found[0]:.4f} to {found[-1]:.4f}"


def resumes(outputs: list[str]) -> str:
    """The second command goes on where the first was at its checkpoint, and has the same losses."""
    whole, rest = losses(outputs[0]), losses(outputs[1])
    behind = len(whole) // 2
    pairs = list(zip(whole[behind:], rest[-behind:], strict=True))
    off = max(abs(one / other - 1) for one, other in pairs)
    if not off <= (APART if torch.cuda.is_available() else 1e-6):
        raise Failed(f"losses after resume are {off:.1e} apart: {pairs}")
    ends = f"{whole[-1]:.6f}, resumed {rest[-1]:.6f}, {off:.0e} apart at most"
    return f"{falls(outputs)}; uninterrupted {ends}; {printed('scaling state', outputs[0])}"


def generates(outputs: list[str]) -> str:
    """Both processes generate the same tokens."""
    tokens = [printed("generated: ", output) for output in outputs]
    if tokens[0] != tokens[1]:
        raise Failed(f"another process generates other tokens: {tokens}")
    return f"in both processes {tokens[1]}; {printed('tokens a second', outputs[1])}"


def ends(outputs: list[str]) -> str:
    """All commands end well; the line is the last that was printed."""
    return outputs[-1].strip().splitlines()[-1]


def printed(part: str, output: str) -> str:
    found = [line for line in output.splitlines() if part in line]
    if not found:
        raise Failed(f"printed nothing with {part!r}")
    return found[-1]


def programs(gpu: bool) -> list[Program]:
    """All of them. Commands name the folder of their program as FOLDER."""
    size = "--shape 1b --layers 4 --context 1024 --batch 8 --steps 20" if gpu else "--steps 8"
    half = 10 if gpu else 4
    run = f"trainer --folder FOLDER {size}"
    adapters = f"{run} --base rowwise --adapters 16"
    ranks = f"fsdp --folder FOLDER {size}"
    two = torch.cuda.device_count() > 1 if gpu else True
    tiny: dict[str, Any] = {"environment": FORCED, "check": ends}
    return [
        Program("trainer", (run, f"{run} --resume FOLDER/checkpoint-{half}"), resumes, ["accelerate"]),
        Program(
            "generate",
            (
                "generate --model ROOT/trainer/model --stored FOLDER/stored",
                "generate --stored FOLDER/stored",
            ),
            generates,
            ["accelerate"],
        ),
        Program(
            "adapters", (adapters, f"{adapters} --resume FOLDER/checkpoint-{half}"), resumes, ["accelerate", "peft"]
        ),
        Program("fsdp", (ranks, f"{ranks} --resume {half}"), resumes, ranks=2 if two else 1),
        *([Program("tensor parallel", (f"{ranks} --tensor-parallel 2",), falls, ranks=2)] if two else []),
        Program("accelerate", ("accelerate_run --folder FOLDER",), packages=["accelerate"], **tiny),
        Program("lightning", ("lightning_run --folder FOLDER",), packages=["lightning"], **tiny),
        Program("fabric", ("lightning_run --folder FOLDER --fabric",), packages=["lightning"], **tiny),
        Program("sft", ("sft --folder FOLDER",), packages=["trl", "peft", "datasets"], **tiny),
        Program("grpo", ("grpo --folder FOLDER --arm fp8 --steps 8",), ends, ["trl", "datasets"]),
        Program("timm", ("timm_run --folder FOLDER",), packages=["torchvision", "timm"], **tiny),
        Program(
            "sentence_transformers",
            ("sentence_transformers_run --folder FOLDER",),
            packages=["sentence_transformers", "datasets"],
            **tiny,
        ),
        Program("diffusers", ("diffusers_run",), packages=["diffusers"], **tiny),
        Program(
            "torchtitan",
            ("torchtitan_run --compile.enable --compile.backend te",),
            packages=["torchtitan", "torchdata"],
            **tiny,
        ),
    ]


def output(program: Program, command: str, root: Path, seconds: float) -> str:
    """What a command printed."""
    folder = root / program.name.replace(" ", "_")
    arguments = command.replace("FOLDER", str(folder)).replace("ROOT", str(root)).split()
    start = [sys.executable, "-m"]
    if program.ranks is not None:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks), "-m"]
    environment = {"TE_INDUCTOR_RECIPE": "delayed"} | dict(os.environ) | (program.environment or {})
    try:
        done = subprocess.run(
            [*start, f"examples.{arguments[0]}", *arguments[1:]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {seconds:.0f} s") from None
    if done.returncode:
        raise Failed(f"exited with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/programs"), help="of what they write")
    parser.add_argument("--only", nargs="+", help="names of programs (default: all)")
    parser.add_argument("--seconds", type=float, default=180, help="limit of one command (default: 180)")
    args = parser.parse_args(argv)
    failed = False
    for program in programs(torch.cuda.is_available()):
        if args.only and program.name not in args.only:
            continue
        if missing := [package for package in program.packages if find_spec(package) is None]:
            print(f"LEFT {program.name}: {', '.join(missing)} not installed", flush=True)
            continue
        begin = time.perf_counter()
        try:
            found = program.check([output(program, command, args.folder, args.seconds) for command in program.commands])
            word = "PASS"
        except Failed as error:
            found, word, failed = str(error), "FAIL", True
        print(f"{word} {program.name} ({time.perf_counter() - begin:.0f} s): {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
