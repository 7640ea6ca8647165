"""Builds of CUTLASS's kernels in a process of its own."""

from pathlib import Path

import torch

from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels.cutlass_tiles import (
    FAST_TILES,
    kernel_of,
)
from te_inductor.templates.cutlass import build

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def broken_compiler(folder: Path, monkeypatch, source: str) -> None:
    """Builds run this where they would import quack."""
    (folder / "quack.py").write_text(source)
    whole = build.environment
    path = f"{folder}:{whole('90')['PYTHONPATH']}"
    monkeypatch.setattr(build, "environment", lambda arch: {**whole(arch), "PYTHONPATH": path})
    monkeypatch.setattr(cutlass, "versions", lambda: (source,))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    build._sources.cache_clear()


KERNEL = kernel_of(FAST_TILES[0], "90", E4M3, E4M3, BF16, "tensor", False, True)
