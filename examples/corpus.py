"""The text that the demo learns: the source files of the standard library of the Python that runs it."""

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 20  # every 20th file is kept for validation


@dataclass(frozen=True)
class Corpus:
    """Bytes of two disjoint sets of files."""

    train: Tensor  # (n,) uint8
    validation: Tensor  # (m,) uint8

    def batches(
        self,
        split: str,  # "train" or "validation"
        *,
        steps: int,
        batch: int,
        context: int,
        seed: int,
    ) -> Tensor:  # (steps, batch, context + 1) int64: inputs are [..., :-1], targets [..., 1:]
        """Random windows; the same arguments give the same windows."""
        text: Tensor = getattr(self, split)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - context, (steps, batch, 1), generator=generator)
        return text[starts + torch.arange(context + 1)].long()


def standard_library() -> Corpus:
    """Modules and packages of the standard library, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts))
    if len(files) < HELD_OUT:
        raise FileNotFoundError(f"{len(files)} source files under {root}, expected the standard library's")
    train = [path for index, path in enumerate(files) if index % HELD_OUT]
    return Corpus(_read(train), _read(files[::HELD_OUT]))


def _read(files: Iterable[Path]) -> Tensor:
    text = bytearray(b"\n".join(path.read_bytes() for path in files))
    return torch.frombuffer(text, dtype=torch.uint8)
