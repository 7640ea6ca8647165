"""Generated code run by Triton's interpreter."""

from pathlib import Path

import torch
from torch import Tensor

from tests.offline.harness import INTERPRETER


def interpret(source: str, runs: list[list[Tensor]], folder: Path) -> list[tuple[Tensor, ...]]:
    (folder / "graph.py").write_text(source)
    torch.save(runs, folder / "inputs.pt")
    names = [str(folder / name) for name in ("graph.py", "inputs.pt", "outputs.pt")]
    done = INTERPRETER.run("tests.offline.interpret", *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "outputs.pt")
