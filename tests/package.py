"""Make a package by AOTInductor, and run it where nothing of te_inductor is imported.

python -m tests.package FOLDER DEVICE DTYPE RECIPE ...      makes one a recipe; `stored:` before a name stores weights
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch import nn
from torch._inductor import config

from te_inductor import lower, quantize_

RUNS = """
import sys, torch
for place in sys.argv[2:]:
    package = torch._inductor.aoti_load_package(f"{place}/model.pt2")
    inputs, outputs = torch.load(f"{place}/tensors")
    for x, expected in zip(inputs, outputs):
        y = package(x)
        error, largest = (y - expected).abs().max().item(), expected.abs().max().item()
        assert y.dtype == expected.dtype and error <= float(sys.argv[1]) * largest, (place, x.shape, error, largest)
assert not any(name.startswith("te_inductor") for name in sys.modules)
"""


def make(folder: Path, device: str, dtype: torch.dtype, recipe: str) -> None:
    """A program with a symbol for its rows, of which one layer is stored or lowered and one is lowered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False)).to(device, dtype).eval()
    stored = recipe.startswith("stored:")
    name = recipe.removeprefix("stored:")
    if stored:
        quantize_(model, name, policy={"2": "none"}, fallback="silent")
    x = torch.randn(24, 256, device=device, dtype=dtype)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=4096)},))
    program = lower(program, {"recipe": "none", "policy": {"*": "rowwise" if stored else name}, "fallback": "silent"})
    # Two files are compiled of a package of the CPU, once: headers that are compiled first cost more than they save.
    once = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch.no_grad(), config.patch(once if device == "cpu" else {}):
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        inputs = [x, *(torch.randn(rows, 256, device=device, dtype=dtype) for rows in (2, 33, 1000))]
        torch.save((inputs, [program.module()(one) for one in inputs]), folder / "tensors")
    with zipfile.ZipFile(folder / "model.pt2") as package:
        for one in package.namelist():
            assert not one.endswith(".json") or b"te_inductor" not in package.read(one), one


def run(folders: list[Path], tolerance: float) -> None:
    """Runs each package in a new process, and compares it with what its program computed, relative to the largest
    output."""
    command = [sys.executable, "-c", RUNS, str(tolerance), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    for recipe in sys.argv[4:]:
        folder = Path(sys.argv[1], recipe.replace(":", "_"))
        folder.mkdir()
        make(folder, sys.argv[2], getattr(torch, sys.argv[3]), recipe)
