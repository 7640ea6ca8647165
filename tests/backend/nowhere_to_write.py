"""Compiles a layer where each folder that Inductor would make is a file: `python -m tests.backend.nowhere_to_write
FOLDER`, with TORCHINDUCTOR_CACHE_DIR=FOLDER. The graph has to run uncompiled, and to say so."""

import itertools
import string
import sys
import warnings
from pathlib import Path

import torch

from te_inductor.recipes import Float8RowwiseScaling
from tests.support.layers import linears


def main(folder: Path) -> None:
    for name in itertools.product(string.ascii_lowercase + string.digits, repeat=2):
        (folder / "".join(name)).touch()
    model, x = torch.nn.Linear(32, 32), torch.randn(6, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.compile(model, backend="te", options={"recipe": "rowwise"})(x)
        y.sum().backward()
    [text] = [str(entry.message) for entry in caught if entry.category.__name__ == "FallbackWarning"]
    assert "a graph runs uncompiled" in text and "TORCHINDUCTOR_CACHE_DIR" in text and "FileExistsError" in text, text
    slots = Float8RowwiseScaling().slots()
    eager = linears(x, [model.weight], [model.bias], slots, x.dtype)[0]
    assert torch.equal(y, eager) and model.weight.grad is not None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
