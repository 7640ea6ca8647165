"""Experts without a GPU: their casts interpreted and as cubins, and the code that is generated for a layer of them."""

import re

import pytest
import torch

from te_inductor.recipes import Quantizer
from tests.offline.harness import INTERPRETER, generate
from tests.support.cuda_code import compiled, spilled

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from te_inductor.templates.triton import casting, experts_rows, group_strips  # noqa: E402
from te_inductor.templates.triton import grouped_casts as kernels  # noqa: E402

M, T, DIM, HIDDEN, EXPERTS = 131072, 16384, 2048, 768, 128  # of tests/offline/cases/experts.py


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.thorough)])
def test_interpreted(which):
    done = INTERPRETER.run("tests.offline.grouped_casts", which)
    assert done.returncode == 0, done.stderr[-3000:]


MODES = {  # what a tile is multiplied with, whether rows are gathered, columns of a tile
    "bytes": (kernels.BYTES, True, 128),
    "known": (kernels.KNOWN, False, 64),
    "of columns": (kernels.OF_COLUMNS, True, 64),
    "tile's columns": (kernels.TILE_COLUMNS, True, 64),
    "square": (kernels.SQUARE, False, 128),
}


@pytest.mark.quick("bytes", "of columns")
@pytest.mark.parametrize("name", MODES)
def test_cubins(name):
    """Loads and stores of 16 bytes a thread; the transpose crosses shared memory in pairs; nothing is spilled."""
    mode, gathered, wide = MODES[name]
    kernel, quantizer = kernels._cast_kernel, Quantizer("e4m3")
    of_bytes = mode == kernels.BYTES
    constants = {
        "MODE": mode, "GATHERED": gathered, "GROUPED": mode == kernels.OF_COLUMNS, "OF_EXPERTS": True,
        "TRANSPOSED": True, "ELEMENT": tl.uint8 if of_bytes else tl.float8e4nv, "TILE": kernels.TILE, "WIDE": wide,
        "PAIRED": True, "stride_c": 1, "SCALING": casting.scaling(quantizer, torch.bfloat16),
    }  # fmt: skip
    types = {"source": "*i32", "tile_groups": "*i32", "scale": "*fp32"}
    types |= {"x": "*u8", "out": "*u8"} if of_bytes else {"x": "*bf16", "out": "*fp8e4nv"}
    multiples = {"wide", "stride_e", "stride_r", "leading"}
    made = compiled(kernel, constants, types, {"num_warps": 8 if mode == kernels.SQUARE else 4}, multiples)
    ptx = made.asm["ptx"]
    assert spilled(made) == 0
    assert "ld.global.v4.b32" in ptx and "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert {"b8", "b16"}.isdisjoint(re.findall(r"st\.global\.(\S+)", ptx)) and "st.global.v4.b32" in ptx
    assert of_bytes or "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.parametrize("columns", [2048, 768, pytest.param(14336, marks=pytest.mark.thorough)])
def test_cubins_of_rows(columns):
    """Loads and stores of 16 bytes a thread, and an atomic a column; nothing is spilled at the registers with which a
    multiprocessor has several programs."""
    config, block = experts_rows.config_of(columns), triton.next_power_of_2(columns)
    constants = {
        "SPAN": config.span, "ROWS": max(config.elements // block, 1), "BLOCK": block, "ELEMENT": tl.float8e4nv,
        "SCALING": casting.scaling(Quantizer("e4m3", scope="row"), torch.bfloat16),
    }  # fmt: skip
    types = {"x": "*bf16", "out": "*fp8e4nv", "scale_inv": "*fp32", "amax": "*i32"}
    multiples = {"wide", "stride_e", "stride_r", "leading"}
    warps = constants["ROWS"] * block // config.of_warp
    options = {"num_warps": warps, "maxnreg": config.registers}
    made = compiled(experts_rows._rows_kernel, constants, types, options, multiples)
    ptx = made.asm["ptx"]
    assert spilled(made) == 0 and "ld.global.v4.b32" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert {"b8", "b16"}.isdisjoint(re.findall(r"st\.global\.(\S+)", ptx)) and re.search(r"(atom|red)\.\S*max", ptx)


def test_cubin_of_strips():
    """Two loops over a group's rows: both load 16 bytes a thread, and the second stores pairs of the transpose."""
    constants = {
        "ELEMENT": tl.float8e4nv, "TILE": kernels.TILE, "WIDE": kernels.COLUMNS, "stride_c": 1,
        "SCALING": casting.scaling(Quantizer("e4m3", scope="row"), torch.bfloat16),
    }  # fmt: skip
    types = {"x": "*bf16", "source": "*i32", "starts": "*i32", "scale_inv": "*fp32", "out": "*fp8e4nv"}
    multiples = {"wide", "stride_r", "leading"}
    options = {"num_warps": group_strips._WARPS, "maxnreg": group_strips._REGISTERS}
    made = compiled(group_strips._strips_kernel, constants, types, options, multiples)
    ptx = made.asm["ptx"]
    assert spilled(made) == 0 and "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4.b32" in ptx and "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert {"b8", "b16"}.isdisjoint(re.findall(r"st\.global\.(\S+)", ptx)) and "st.global.v4.b32" in ptx


RECIPES = ["delayed", "rowwise", pytest.param("current", marks=pytest.mark.thorough)]


@pytest.mark.quick("delayed")
@pytest.mark.parametrize("recipe", [*RECIPES, pytest.param("block", marks=pytest.mark.thorough)])
def test_generated_code(recipe):
    """Three grouped GEMMs a layer; the rows of x are cast before they are gathered; nothing is scattered, no row of the
    experts is written in bf16 but by a GEMM, and the host reads nothing."""
    forward, backward = generate(f"experts_{recipe}", 90).sources
    assert forward.count("te_inductor.grouped_mm.default(") == 2
    assert backward.count("te_inductor.grouped_mm.default(") == backward.count("grouped_wgrad.default(") == 2
    # The forward keeps, of the rows of experts, what both GEMMs wrote: what is computed or cast of that is made again.
    kept = re.findall(r"assert_size_stride\((\w+), \((\d+), (?!1\))\d+\), .*'input'\)", backward)
    assert [name for name, rows in kept if int(rows) >= M] == ["grouped_mm_1", "grouped_mm"]
    code = forward + backward
    assert not re.search(r"\.item\(|\.tolist\(|\.cpu\(|_grouped_mm\(", code)
    gathered = re.search(rf"empty_strided_cuda\(\(({M}), {DIM}\), \({DIM}, 1\), torch.float8_e4m3fn\)", forward)
    rows = rf"{T}, {DIM // 128}, 128" if recipe == "block" else f"{T}, {DIM}"
    cast = re.search(rf"empty_strided_cuda\(\({rows}\), \([\d, ]+\), torch.float8_e4m3fn\)", forward)
    assert gathered and cast
    wide = re.findall(rf"empty_strided_cuda\(\({M}, \d+\), \(\d+, 1\), torch.bfloat16\)", code)
    # A gradient is written in bf16 where its scale is not known before it is read again: rows, columns, blocks.
    assert len(wide) <= {"delayed": 0, "current": 1, "rowwise": 3, "block": 3}[recipe], wide


def test_delayed_casts_in_passing():
    """Both gradients are cast, and their amaxes recorded, in the kernels that compute them: the router's weight times the
    gradient of the token, and SwiGLU's backward, which makes the copy of SwiGLU itself for wgrad from the same read."""
    made = generate("experts_delayed", 90)
    names = re.findall(r"^\s+(triton_\w+)\.run\(", made.sources[1], re.MULTILINE)
    casts = [name for name in names if "quantize_delayed" in name]
    assert len(casts) == 3  # the third is the copy of x, which wgrad transposes
    assert any("sum" in name for name in casts)
    [swiglu] = [kernel for kernel in made.kernels if kernel.name in casts and "sigmoid" in kernel.name]
    assert len(re.findall(r"tl\.load\(.*\.to\(tl\.float32\)", swiglu.body)) == 3  # dh, gate and up, each once
    assert swiglu.body.count("tl.store(") == 3 and swiglu.body.count("tl.atomic_max(") == 1


@pytest.mark.thorough
def test_bias_gradients_are_added_in_one_order() -> None:
    """The sums of the tiles of an expert are added without atomics, which are slow and add in any order."""
    sums = [kernel for kernel in generate("experts_biased_delayed", 90).kernels if "_sum_" in kernel.name]
    assert sum("split_with_sizes" in kernel.name for kernel in sums) == 2  # gate and up, and down
    assert not any("atomic_add" in kernel.body for kernel in sums if "split_with_sizes" in kernel.name)
