"""Packages a quantized model as the first thing that a process compiles: `python -m tests.backend.packaged_program
PACKAGE RECIPE`."""

import sys

import torch
from torch import nn
from torch._inductor import config

from te_inductor import quantize_


def main(package: str, recipe: str) -> None:
    model, x = quantize_(nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 48)), recipe), torch.randn(5, 96)
    # Each of the two files is compiled once: headers that are compiled first would cost more than they save.
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch.no_grad(), config.patch(quick):
        program = torch.export.export(model, (x,))
        found = torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=package)
        )
        torch.testing.assert_close(found(x), model(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
