"""CUTLASS's GEMMs without a GPU: the call in generated code, its tile, and cuBLASLt where the table says so; the
kernels' machine code, and the arguments that they are launched with."""

import ast
import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch

from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels import cutlass_tiles as template
from te_inductor.kernels.cutlass_tiles import Kernel, kernel_of
from te_inductor.kernels.problem import ANOTHER, NOTHING, OUTPUT, Problem
from te_inductor.templates.cutlass import build
from tests.offline.harness import generate
from tests.support.cuda_code import machine_code
from tests.support.interpreted import interpret
from tests.support.kernels import dense

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
E2M1 = torch.float4_e2m1fn_x2


def test_each_gemm_is_what_the_table_names():
    """fprop has the layer's bias, and accumulates fast."""
    problems = {
        "fprop": dense(16384, 6144, 4096, bias=True),
        "dgrad": dense(16384, 4096, 6144, "tensor", False, ("e5m2", "e4m3")),
        "wgrad": dense(6144, 4096, 16384, "tensor", False, ("e5m2", "e4m3")),
    }
    [fprop], _ = check_calls("cutlass_training", problems)
    assert "arch='90', scope='tensor', fast_accum=True" in fprop


def test_each_gemm_with_scales_of_blocks_is_what_the_table_names():
    """The weight has square blocks; the layer's bias, which our kernel does not add, leaves fprop to cuBLASLt."""
    problems = {
        "fprop": dense(16384, 6144, 4096, "128x128", False, bias=True),
        "dgrad": dense(16384, 4096, 6144, "128x128", False),
        "wgrad": dense(6144, 4096, 16384, "1x128", False),
    }
    forward, backward = check_calls("cutlass_blocks", problems)
    assert not forward and any("arch='90', scope='1x128', fast_accum=False" in line for line in backward)


def check_calls(case: str, problems: dict[str, Problem]) -> list[list[str]]:
    """Checks that CUTLASS is called, with its tile, where the table names one; returns the calls of the forward, of the
    backward."""
    found = [tables.choose(problem) for problem in problems.values()]
    tiles = [tile for tile in found if tile is not None]
    sources = generate(case, 90).sources
    calls = [
        [line for line in source.splitlines() if "extern_kernels." in line and "out=" in line] for source in sources
    ]
    ours = [[line for line in lines if "te_inductor_cutlass_scaled_mm" in line] for lines in calls]
    assert sum(map(len, calls)) == 3 and sum(map(len, ours)) == len(tiles)
    named = {re.search(r"tile=(\([^)]*\))", line).group(1) for lines in ours for line in lines}
    assert named == {str(tile.shape) for tile in tiles}
    return ours


# Every tile of the tuned table and every candidate of max-autotune: the operands, and whether there is a bias.
KINDS = {
    "90": {"tensor": (E4M3, E4M3, True), "row": (E5M2, E4M3, False)},
    "100": {"1x32": (E5M2, E4M3, False), "1x16": (E2M1, E2M1, True)},
    "120": {"1x32": (E4M3, E4M3, True), "1x16": (E2M1, E2M1, False)},
}
# The tensor cores' instructions; those of Blackwell are the ones that apply scales of blocks.
INSTRUCTIONS = {
    ("90", "tensor"): r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3",
    ("90", "row"): r"QGMMA\.64x\d+x32\.F32\.E5M2\.E4M3",
    ("90", "1x128"): r"QGMMA\.64x128x32\.F32\.E5M2\.E4M3",
    ("90", "128x128"): r"QGMMA\.64x128x32\.F32\.E4M3\.E5M2",
    ("100", "1x32"): r"UTCQMMA(\.2CTA)?",
    ("100", "1x16"): r"UTCOMMA(\.2CTA)?\.4X",
    ("120", "1x32"): r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
    ("120", "1x16"): r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
}


@pytest.mark.quick("cutlass_residual")
@pytest.mark.parametrize("case", ["cutlass_residual", "cutlass_residual_block"])
def test_a_residual_is_read_by_the_gemm(case):
    """The GEMM of down's reads it: the graph's input stands in its call, and nothing is computed behind it. Scales of blocks
    are as its kernel reads them: rows of x side by side, and blocks of the weight along K."""
    forward, backward = generate(case, 90).sources
    assert backward.count("added=") == 0
    *_, last = [line for line in forward.splitlines() if "extern_kernels." in line or ".run(" in line]
    assert re.search(r"cutlass_scaled_mm\(.*, primals_2, tile=.*, added='another', out=buf\d+\)", last)
    if case == "cutlass_residual_block":
        scales = re.search(r"(\w+), reinterpret_tensor\(\w+, \(112, 32\), \(1, 112\), 0\), primals_2, ", last)
        assert scales and f"{scales[1]} = empty_strided_cuda((16384, 112), (1, 16384), " in forward


def test_an_activation_and_its_cast_are_the_gemm_s(tmp_path):
    """GELU's MLP under delayed scaling, without gradients: what kernels cast is the input and the weights. Each tensor
    has a power of two of its own for a scale, which changes no result where everything has the right one."""
    generated = generate("cutlass_quantized", 90)
    [source] = generated.sources
    first, second = (line for line in source.splitlines() if "extern_kernels." in line and "out=" in line)
    assert "cutlass_quantized_mm(" in first and "('erf', 2)" in first
    casts = [line for line in source.splitlines() if "quantize_delayed" in line and ".run(" in line]
    assert len(casts) == 3 and not any("erf" in kernel.source for kernel in generated.kernels)
    assert f"({re.findall(r'out=(buf[0-9]+)', first)[0]}, " in second  # nothing in between
    layers = {(2048, 512): 4, (2048,): 1, (1024, 512): 1, (512, 2048): 4, (512,): 1}  # and what divides them
    w1, b1, x, w2, b2 = operands = [(torch.randn(shape) / by).bfloat16() for shape, by in layers.items()]
    given = dict(zip(layers, operands, strict=True))
    shapes = [ast.literal_eval(shape) for shape in re.findall(r"= rand_strided\((\([\d, ]*\))", source)]
    state = iter([torch.tensor([*[0.0] * 1024, scale]) for scale in (1.0, 2.0, 4.0, 8.0)])
    [(y,)] = interpret(source, [[given[shape] if shape in given else next(state) for shape in shapes]], tmp_path)
    h = torch.nn.functional.gelu(x.to(E4M3).float() @ w1.to(E4M3).float().t() + b1.float())
    expected = h.to(E4M3).float() @ w2.to(E4M3).float().t() + b2.float()
    assert (y.float() - expected).norm() <= 0.02 * expected.norm()


def kernels(arch: str) -> list[Kernel]:
    """One a tile and a kind; on Hopper one a kind, as those are built and launched on the GPU too, those that add, and
    those with scales of blocks. "some of 90" has one whose epilogue casts, and one with scales of blocks that adds."""
    if arch == "some of 90":
        adding = next(kernel for kernel in hoppers() if kernel.scope == "128x128" and kernel.added == ANOTHER)
        return [hoppers()[0], adding]
    return [
        kernel_of(tile, arch, a, b, BF16, scope, bias, fast)
        for (candidate, fast), tiles in template.CANDIDATES.items()
        for scope, (a, b, bias) in KINDS[arch].items()
        for tile in (tiles[:1] if arch == "90" else tiles)
        if candidate == arch
    ] + (hoppers() if arch == "90" else [])


def hoppers() -> list[Kernel]:
    gelu = (("mul", 0, 0.5), ("mul", 0, 0.5**0.5), ("erf", 2), ("add", 3, 1.0), ("mul", 1, 4))
    quantizing = [
        kernel_of(template.QUANTIZED_TILES[0], "90", E4M3, E4M3, E4M3, "tensor", True, True, NOTHING, gelu),
        kernel_of(
            template.QUANTIZED_TILES[2],
            "90",
            E4M3,
            E4M3,
            E5M2,
            "tensor",
            False,
            True,
            NOTHING,
            (("relu", 0),),
        ),
    ]
    adding = [
        kernel_of(template.SPLIT_TILES[3], "90", E5M2, E4M3, torch.float32, "row", False, False, OUTPUT),
        kernel_of(template.FAST_TILES[5], "90", E4M3, E4M3, BF16, "tensor", True, True, ANOTHER),
        *(
            kernel_of(tile, "90", E4M3, E5M2, BF16, "128x128", False, False, ANOTHER)
            for tile in template.BLOCK_TILES[::2]
        ),
    ]
    formats = {"1x128": (E5M2, E4M3, BF16), "128x128": (E4M3, E5M2, torch.float16)}
    pairs = zip(template.BLOCK_TILES, formats.items(), strict=False)
    return [
        *quantizing,
        *adding,
        *(kernel_of(tile, "90", *dtypes, scope, False, False) for tile, (scope, dtypes) in pairs),
    ]


@pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed")
@pytest.mark.quick("some of 90")
@pytest.mark.parametrize("which", ["some of 90", *template.ARCHITECTURES])
def test_kernels_multiply_on_tensor_cores_and_are_launched_as_quack_does(which, tmp_path):
    asked, arch = kernels(which), which.split()[-1]
    command = [sys.executable, "-m", "tests.offline.cutlass_kernels"]
    command += [json.dumps([dataclasses.asdict(kernel) for kernel in asked]), str(tmp_path)]
    done = subprocess.run(command, env=build.environment(arch), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for number, kernel in enumerate(asked):
        code = machine_code(tmp_path / f"{number}.o")
        assert re.search(rf"\.target\s+sm_{arch}a?\s", code)  # Triton 3.6's disassembler writes no "a"
        found = set(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w*MMA[\w.]*)", code, re.MULTILINE))
        assert found and all(re.match(INSTRUCTIONS[arch, kernel.scope], name) for name in found), (kernel, found)
        assert ("UTMAREDG.2D.ADD" in code) == (kernel.added == OUTPUT)
        assert ("F2FP.SATFINITE" in code) == (kernel.activation is not None)
        if kernel.scope in ("1x128", "128x128"):
            check_blocks_loop(code, adds=kernel.added == ANOTHER)
        paired = arch == "100" and kernel.tile_m == 256
        assert any(".2CTA" in name for name in found) == paired


def check_blocks_loop(code: str, adds: bool) -> None:
    """Two halves of four instructions each, of which each half is waited for once, and nothing is spilled. Where ptxas
    cannot follow which registers are read when, it waits for every instruction. What is added is loaded by the same
    accelerator as operands, and read four matrices of 8 x 8 at a time."""
    assert len(re.findall(r"\bQGMMA", code)) == 8
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR", code)) == 2
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert len(re.findall(r"\bLDSM\.16\.M88\.4\b", code)) == (16 if adds else 0)
