"""CUTLASS's GEMMs in generated code: the call, its tile, and cuBLASLt where the table says so."""

import dataclasses
import re

import torch

from te_inductor.templates.cutlass import scaled_mm as template
from te_inductor.templates.cutlass.scaled_mm import Problem
from tests.offline.harness import generate

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def test_each_gemm_is_what_the_table_names(monkeypatch):
    monkeypatch.setattr(template, "runs_on", lambda device: True)
    forward, backward = generate("cutlass_training", 90).sources
    problems = {  # fprop has the layer's bias, and accumulates fast
        "fprop": Problem(16384, 6144, 4096, E4M3, E4M3, BF16, False, True, True),
        "dgrad": Problem(16384, 4096, 6144, E5M2, E4M3, BF16, False, False, False),
        "wgrad": Problem(6144, 4096, 16384, E5M2, E4M3, BF16, False, False, False),
    }
    tiles = {name: template.choose(problem, torch.device("cuda")) for name, problem in problems.items()}
    assert tiles["fprop"] is not None
    calls = [line for line in (forward + backward).splitlines() if "extern_kernels." in line and "out=" in line]
    ours = [line for line in calls if "te_inductor_cutlass_scaled_mm" in line]
    assert len(calls) == 3 and len(ours) == sum(tile is not None for tile in tiles.values())
    found = {re.search(r"tile=(\([^)]*\))", line).group(1) for line in ours}
    assert found == {str(dataclasses.astuple(tile)) for tile in tiles.values() if tile is not None}
    [fprop] = [line for line in ours if line in forward]
    assert "by_row=False, fast_accum=True" in fprop
