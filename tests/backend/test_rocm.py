"""AMD GPUs, which torch calls "cuda" too, are refused by name; nobody takes their numbers for compute capabilities."""

import ast
from pathlib import Path

import pytest
import torch

import te_inductor
from te_inductor import compat
from te_inductor.passes.pre_grad.decide import support
from te_inductor.recipes import Gemm
from te_inductor.runtime import small_m
from te_inductor.templates.cutlass import scaled_mm

PACKAGE = Path(te_inductor.__file__).parent
DEVICE = torch.device("cuda", 0)


def test_one_place_asks_for_a_capability():
    asking = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "get_device_capability"
    }
    assert asking == {"compat.py"}


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5), (10, 0)])
def test_refused_by_name(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("te_inductor.templates.cutlass.missing", lambda: None)
    sizes, dtypes = (4096, 4096), (torch.float8_e4m3fn,) * 2
    assert support.device(DEVICE) is None
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert str(support.device(DEVICE)) == "an AMD GPU (ROCm 6.4.1), the kernels are for NVIDIA's"
    assert compat.capability_of(DEVICE) == (0, 0)
    assert small_m.choose(DEVICE, 16, sizes, dtypes, Gemm("fprop", fast_accum=True)) is None
    assert scaled_mm.architecture(DEVICE) is None
    assert not compat.has_microscaled_mm(DEVICE) and not compat.has_block_scaled_mm(DEVICE)
