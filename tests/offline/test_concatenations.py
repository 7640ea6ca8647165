"""Casts of what a concatenation is made of, in generated code (passes/joint/concatenations.py)."""

import re
from pathlib import Path

import pytest

from te_inductor.lowerings.codegen.tiles import FLAT_OF_THREE
from tests.offline.harness import compile_to_cubin, generate
from tests.support.cuda_code import spilled

pytest.importorskip("triton")
thorough = pytest.mark.thorough


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(one, marks=thorough) for one in ("current", "rowwise"))])
def test_a_layer_that_is_cut_in_two(recipe):
    """A kernel of SwiGLU's gradient reads dh, gate and up once for both halves, as of gate and up that are two layers;
    the gradient is not written in bf16."""
    made = generate(f"one_parameter_{recipe}", 90)
    backward = made.sources[1]
    assert "_cat_" not in backward
    of_swiglu = [kernel for kernel in made.kernels if "sigmoid" in kernel.name]
    assert sum("*fp8" in str(kernel.meta["signature"]) for kernel in of_swiglu) == 1
    for kernel in of_swiglu:  # the others look for an amax
        assert len(set(re.findall(r"tl\.load\((in_ptr\d \+ .*?), .*\.to\(tl\.float32\)", kernel.body))) <= 3
    wide = re.findall(r"empty_strided_cuda\(\(16384, 28672\), \(28672, 1\), torch.bfloat16\)", backward)
    assert not wide


@thorough
def test_cubin(tmp_path: Path):
    """The kernel is that of experts' gradients: vectors of 16 bytes, nothing spilled, one reduction of the amax."""
    kernel = generate("experts_delayed", 90).kernel("sigmoid", "quantize_delayed")
    assert kernel.tile == FLAT_OF_THREE
    made = compile_to_cubin(kernel, 90, tmp_path)
    ptx = made.asm["ptx"]
    assert spilled(made) == 0 and "ld.global.v4.b32" in ptx and "cvt.rn.satfinite.e5m2x2.f32" in ptx
    assert {"b8", "b16", "b32"}.isdisjoint(re.findall(r"st\.global\.(\S+)", ptx))
    assert len(re.findall(r"(?:atom|red)\.\S*max", ptx)) == 1
