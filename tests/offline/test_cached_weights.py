"""The kernels of kept weights without a GPU: interpreted, and as cubins."""

import re

import pytest
import torch
import triton.language as tl

from te_inductor.numerics.arithmetic import reciprocal
from te_inductor.recipes import Quantizer
from te_inductor.templates.triton import cached_weights, casting
from te_inductor.templates.triton.cached_microscaled_kernels import cached_weights_cast_microscaled
from tests.offline.harness import INTERPRETER, assert_words, generate
from tests.support import cuda_code
from tests.support.cuda_code import spilled


@pytest.mark.thorough
def test_interpreted():
    """Bit for bit the eager look's copies and digests: several weights, what has changed and what has not."""
    done = INTERPRETER.run("tests.offline.cached_weights_kernels")
    assert done.returncode == 0, done.stderr[-3000:]


TYPES = {
    "programs": "*i32", "amax": "*i32", "amaxes": "*i32", "stale": "*i32", "chunks": "i32",
    "scale": "*fp32", "scales": "*fp32",
}  # fmt: skip


def compiled(kernel, constants: dict, warps: int, capability: int, registers: int | None = None):
    types = {name: TYPES.get(name, "*i64") for name in kernel.arg_names}
    options = {"num_warps": warps, "maxnreg": registers}
    return cuda_code.compiled(kernel, constants, types, options, ("chunks",), capability)


TILE = {"INPUT": tl.bfloat16, "TILE": cached_weights.TILE, "ALIGNED": True}


@pytest.mark.quick("tensor-True-90", "row-False-90", "128x128-False-100")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("scope", "known"), [("tensor", False), ("tensor", True), ("row", False), ("128x128", False)])
def test_cubins(scope, known, capability):
    """Loads and stores of 16 bytes a thread, of the column copy too, which crosses shared memory in pairs; atomics on
    whole words, casts by the hardware's conversion. Nothing is spilled, but of scales of rows, which is as fast as
    without."""
    quantizer = Quantizer("e4m3", scope=scope)
    whole, by_row = scope == "tensor", scope == "row"
    encode = {"SCALING": casting.scaling(quantizer, torch.bfloat16)}
    cast = TILE | encode | {"ELEMENT": tl.float8e4nv, "WHOLE": whole, "BY_ROW": by_row, "KNOWN": known}
    made = compiled(
        cached_weights.cached_weights_cast, cast, cached_weights.WARPS, capability, cached_weights.REGISTERS
    )
    ptx = made.asm["ptx"]
    assert made.asm["cubin"] and "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert by_row or spilled(made) == 0
    assert bool(re.search(r"(atom|red)\.\S*max\.s32", ptx)) == known
    assert_words(ptx, scope)
    assert "ld.global.v4.b32" in ptx and "ldmatrix" in ptx
    stores = re.findall(r"st\.global\.(\S+)", ptx)
    assert stores.count("v4.b32") == 16 and not {"b8", "b16"} & set(stores)
    if known or scope == "128x128":
        assert "ld.global.v2.b64" in ptx
        return
    scan = TILE | {"BY_ROW": by_row}
    made = compiled(cached_weights.cached_weights_scan, scan, cached_weights.WARPS, capability)
    ptx = made.asm["ptx"]
    assert "ld.global.v2.b64" in ptx and ".add.u64" in ptx and ".max.s32" in ptx and spilled(made) == 0
    decide = {"WHOLE": whole, "TWO_LEVEL": False} | encode
    assert compiled(cached_weights.cached_weights_decide, decide, 1, capability).asm["cubin"]
    if by_row:
        scales = encode | {"BLOCK": cached_weights.SCALES}
        assert compiled(cached_weights.cached_weights_scales, scales, 4, capability).asm["cubin"]


@pytest.mark.quick("e2m1-16x16-100")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("element", "scope"), [("e4m3", "1x32"), ("e2m1", "16x16")])
def test_cubins_of_microscaled_casts(element, scope, capability):
    quantizer = Quantizer(element, scope=scope)
    down, across = quantizer.granularity.block
    constants = TILE | {
        "ELEMENT": {"e4m3": tl.float8e4nv, "e2m1": tl.uint8}[element],
        "TWO_LEVEL": "16" in scope,
        "PACKED": 2 if element == "e2m1" else 1,
        "LARGEST": quantizer.format.max,
        "INVERSE": reciprocal(quantizer.format.max),
        "DOWN": down,
        "ACROSS": across,
    }
    made = compiled(cached_weights_cast_microscaled, constants, cached_weights.WARPS, capability)
    assert made.asm["cubin"] and "ld.global.v4.b32" in made.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]  # of elements, or of NVFP4's scales
    assert element == "e2m1" or "st.global.v4.b32" in made.asm["ptx"]


@pytest.mark.quick("_delayed-90-casts1")
@pytest.mark.parametrize(
    ("recipe", "arch", "casts"), [("", 90, [9, 3]), ("_delayed", 90, [3, 3]), ("_mxfp8", 100, [3, 3])]
)
def test_generated(recipe, arch, casts):
    """The graphs of a transformer's MLP have lost the launches that cast gate and up, and down, and no other."""
    plain, kept = (generate(f"mlp_training{recipe}{kind}", arch) for kind in ("", "_kept"))
    launches = [[source.count(".run(") for source in code.sources] for code in (plain, kept)]
    assert [a - b for a, b in zip(*launches, strict=True)] == casts
    counts = [[source.count("extern_kernels._scaled_mm(") for source in code.sources] for code in (plain, kept)]
    assert counts[0] == counts[1]
