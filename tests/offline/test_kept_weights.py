"""The kernels of kept weights without a GPU: interpreted, and as cubins."""

import os
import re
import subprocess
import sys

import pytest
import torch

from te_inductor.recipes import Quantizer
from tests.offline.harness import HERE, assert_words, generate

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from te_inductor.runtime.microscaling import reciprocal  # noqa: E402
from te_inductor.templates.triton import kept_weights  # noqa: E402
from te_inductor.templates.triton.kept_microscaled_kernels import kept_weights_cast_microscaled  # noqa: E402


def test_interpreted():
    """Bit for bit the eager look's copies and digests: several weights, what has changed and what has not."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.offline.kept_kernels"]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(kernel, constants: dict, warps: int, capability: int):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tables = {"programs": "*i32", "amax": "*i32", "amaxes": "*i32", "stale": "*i32", "scale": "*fp32"}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    signature = {name: "constexpr" if name in constants else tables.get(name, "*i64") for name in places}
    aligned = {place: [["tt.divisibility", 16]] for name, place in places.items() if name not in constants}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={places[k]: v for k, v in constants.items()}, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("scope", ["tensor", "row", "128x128"])
def test_cubins(scope, capability):
    """Loads of 16 bytes a thread, atomics on whole words, casts by the hardware's conversion; a weight that has not changed
    costs a cast nothing but the address of its mark."""
    high, wide, steps, warps = kept_weights.TILES[scope]
    whole = scope == "tensor"
    scan = {"BLOCK": kept_weights.SCAN_WORDS, "BITS": 16, "AMAX": whole, "ALIGNED": True}
    ptx = compiled(kept_weights.kept_weights_scan, scan, kept_weights.SCAN_WARPS, capability).asm["ptx"]
    assert re.search(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", ptx) and ".add.u64" in ptx
    quantizer = Quantizer("e4m3", scope=scope)
    encode = {
        "LARGEST": quantizer.format.max,
        "EPSILON": 0.0,
        "LARGEST_SCALE": quantizer.largest_scale(torch.bfloat16),
        "POWER_2": False,
    }
    tile = {"INPUT": tl.bfloat16, "HIGH": high, "WIDE": wide, "STEPS": steps, "ALIGNED": True}
    cast = tile | {"ELEMENT": tl.float8e4nv, "WHOLE": whole, "BY_ROW": scope == "row"}
    for record in {False, whole}:
        made = compiled(
            kept_weights.kept_weights_cast, cast | encode | {"RECORD": record, "LOOK": not record}, warps, capability
        )
        ptx = made.asm["ptx"]
        assert made.asm["cubin"] and "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert bool(re.search(r"(atom|red)\.\S*max\.s32", ptx)) == record
        assert_words(ptx, scope)
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    if scope == "row":
        amaxes = compiled(kept_weights.kept_weights_amaxes, tile, warps, capability)
        assert ".max.s32" in amaxes.asm["ptx"] and amaxes.asm["cubin"]
    for known, look in {(False, True), (whole, True), (whole, not whole)}:
        decide = {"INPUT": tl.bfloat16, "WHOLE": whole, "TWO_LEVEL": False, "KNOWN": known, "LOOK": look} | encode
        assert compiled(kept_weights.kept_weights_decide, decide, 1, capability).asm["cubin"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("element", "scope"), [("e4m3", "1x32"), ("e2m1", "16x16")])
def test_cubins_of_microscaled_casts(element, scope, capability):
    quantizer = Quantizer(element, scope=scope)
    high, wide, steps, warps = kept_weights.TILES[scope]
    down, across = quantizer.granularity.block
    constants = {
        "INPUT": tl.bfloat16,
        "ELEMENT": {"e4m3": tl.float8e4nv, "e2m1": tl.uint8}[element],
        "TWO_LEVEL": element == "e2m1",
        "LARGEST": quantizer.format.max,
        "INVERSE": reciprocal(quantizer.format.max),
        "DOWN": down,
        "ACROSS": across,
        "HIGH": high,
        "WIDE": wide,
        "STEPS": steps,
        "ALIGNED": True,
    }
    made = compiled(kept_weights_cast_microscaled, constants, warps, capability)
    assert made.asm["cubin"] and "ld.global.v4.b32" in made.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]  # of elements, or of NVFP4's scales
    assert element == "e2m1" or "st.global.v4.b32" in made.asm["ptx"]


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
