"""What `explain` says of two blocks of a Llama, on a device that torch is made to believe in::

    python -m tests.offline.decisions SHIM ARCH RECIPE

or, where ARCH is the name of a target, on the meta device and about that target. Runs as a program of its own."""

import contextlib
import ctypes
import json
import sys
from typing import Any

from tests.offline.generate import NAMES, pretend


def decided(device: str, recipe: str, target: str | None) -> dict[str, Any]:
    """The report, without what it expects of a device elsewhere."""
    import torch

    from benchmarks.llama_blocks import Blocks, Shape
    from te_inductor import explain

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Blocks(Shape(batch=2))
        model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
        x = torch.empty(2, 4096, 4096, requires_grad=True)
    report = explain(model, x, target=target, options={"recipe": recipe, "fallback": "silent"}).to_dict()
    return {name: found for name, found in report.items() if name != "expected"}


def main(shim: str, arch: str, recipe: str) -> None:
    if shim:
        ctypes.CDLL(shim, mode=ctypes.RTLD_GLOBAL)
    if arch in NAMES.values():
        print(json.dumps(decided("meta", recipe, arch)))
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        for patch in pretend(int(arch)):
            stack.enter_context(patch)
        with FakeTensorMode(allow_non_fake_inputs=True):
            print(json.dumps(decided("cuda", recipe, None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
