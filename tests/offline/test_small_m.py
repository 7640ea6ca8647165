"""FP8 GEMMs of few rows without a GPU: as a cubin, and in generated code. test_nvfp4.py has the kernel interpreted."""

import argparse
import itertools
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.kernels.problem import Problem, Sizes
from te_inductor.recipes import Gemm
from te_inductor.targets import sm90
from tests.forked import PROGRAMS
from tests.offline.harness import generate
from tests.support.cuda_code import TOUCHES, compiled
from tests.support.kernels import CPU, H200

triton = pytest.importorskip("triton")

from benchmarks import few_rows  # noqa: E402


def chosen(most, n, k, scopes=("row", "tensor"), elements=("e4m3", "e4m3"), target=H200):
    """How the work is cut of a product of at most so many rows; None where the kernel is not taken."""
    problem = Problem(target, Sizes(None, n, k, at_most=most), Gemm("fprop", True, scopes, elements), torch.bfloat16)
    choice = small_m.FAMILY.choice(problem)
    return choice and choice.config


def test_cut(monkeypatch):
    """Every K that the kernel takes is cut into whole blocks, in shared memory, whatever N. The rest is left alone."""
    for n in (64, 70, 1024, 2560, 4096, 6144, 28672, 128256):
        for k in (128, 256, 384, 4096, 9728, 14336):
            for m in (1, 16, 17, 64, 65, 129, 256, 1000):
                config = small_m.cut(m, n, k)
                assert k % config.block_k == 0 and config.splits <= k // config.block_k and config.stages > 1
                assert config.rows >= min(m, small_m.TILE)
                programs = -(-n // config.block_n) * -(-m // config.rows) * config.splits
                taken = config.stages * (config.block_n + config.rows) * config.block_k
                # One program a multiprocessor where each can have one, else at least two: the card is filled once.
                assert taken <= sm90.LIMITS.shared_memory
                assert (taken > small_m.half(sm90.LIMITS)) == (programs <= sm90.LIMITS.multiprocessors)
                if config.splits > 1:
                    assert programs <= 2 * sm90.LIMITS.multiprocessors
    assert chosen(16, 64, 128) == small_m.cut(16, 64, 128)
    for most, n, k in ((None, 64, 128), (16, 63, 128), (16, 64, 64), (16, None, 128)):
        assert chosen(most, n, k) is None
    assert chosen(16, 64, 128, target=CPU) is None
    assert chosen(16, 64, 128, ("row", "tensor"), ("e4m3", "e5m2")) is None
    assert chosen(16, 64, 128, ("1x128", "128x128")) is None
    monkeypatch.setattr(small_m, "PAYS", {128: ((20, 0),), 256: ((40, 4096),)})
    for m, n, k, ours in (
        (64, 128256, 128, True),
        (65, 2560, 4096, True),
        (128, 2561, 4096, False),  # 21 tiles
        (129, 2560, 4096, True),
        (129, 2560, 3968, False),
        (256, 2561, 4096, False),  # 42
        (257, 64, 4096, False),
    ):
        assert (chosen(small_m.at_most(lambda rows, m=m: m <= rows), n, k) is not None) == ours


WAYS = [(64, small_m.WAYS[64]), (256, small_m.WAYS[256])]
TRIED = [pytest.param(rows, way, marks=pytest.mark.thorough) for rows in few_rows.TRIED for way in few_rows.TRIED[rows]]


@pytest.mark.parametrize(("rows", "way"), [*WAYS, *TRIED], ids=str)
def test_resources(rows, way):
    """The kernels are those of the ways to cut, and those that the benchmark tries: no registers are spilled, stages
    fit."""
    from te_inductor.templates.triton import fp8_small_m

    config = small_m.cut(rows, 2560, 4096, way)
    constants = {
        "K": 4096, "OF_ROWS": (True, True), "ROWS": config.rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "SPLITS": config.splits, "STAGES": config.stages, "ASSEMBLY": True,
    }  # fmt: skip
    types = {"a": "*fp8e4nv", "a_scale": "*fp32", "b": "*fp8e4nv", "b_scale": "*fp32", "out": "*fp32"}
    made = compiled(fp8_small_m._partial_sums, constants, types, {"num_warps": config.warps})
    assert made.metadata.shared == config.stages * (config.block_n + config.rows) * config.block_k
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32", made.asm["ptx"])
    # A warp group has 64 rows of b and all of a's, or shares them with the other one; an instruction has 32 columns.
    products = config.block_n * config.rows // 64 // (config.warps // 4) * config.block_k // 32
    assert sum(map(int, found)) == products
    assert spilled(made.asm["cubin"]) == 0


def test_what_the_benchmark_says():
    """Ways are ranked by their distance from the fastest of each layer, with the package's number of stages."""
    fast, slow = few_rows.TRIED[256][:2]
    rows = []
    for n, k in ((2560, 4096), (4096, 14336)):
        for way, us in ((slow, 20.0), (fast, 10.0)):
            config = small_m.cut(256, n, k, way)
            rows.append(few_rows.Measured(n, k, 256, us, 12.0, 15.0, config, (way,), way == fast))
            deep = replace(config, stages=config.stages + 1)
            rows.append(few_rows.Measured(n, k, 256, 40.0, 12.0, 15.0, deep, (way,), False))
    ranks = [
        ("the package's", fast, "1.00"),
        ("the package's", slow, "0.50"),
        ("all", fast, "0.25"),
        ("all", slow, "0.25"),
    ]
    found = few_rows.ranked(rows)
    assert found[:2] == [(256, str(way), stages, 2, mean) for stages, way, mean in ranks[:2]]
    assert sorted(found[2:]) == sorted((256, str(way), stages, 2, mean) for stages, way, mean in ranks[2:])
    assert [row[:4] for row in few_rows.against_library(rows)] == [(256, 40, 4096, "1.50"), (256, 64, 14336, "1.50")]
    options = argparse.Namespace(all=3)
    for m, (n, k) in itertools.product((1, 64, 100, 256), few_rows.LAYERS):
        found = few_rows.configs(m, n, k, options)
        assert small_m.cut(m, n, k) in found
        for config in found:
            assert config.stages * (config.block_n + config.rows) * config.block_k <= sm90.LIMITS.shared_memory


def spilled(cubin: bytes) -> int:
    """Bytes of a thread's stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    [stack] = re.findall(r"STACK:(\d+)", usage.stdout)
    return int(stack)


def test_cubin():
    """The tensor core multiplies what copies brought to shared memory; sums are promoted; nothing before the wait."""
    from te_inductor.templates.triton import fp8_small_m

    constants = {
        "K": 4096, "OF_ROWS": (True, False), "ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 256, "SPLITS": 2,
        "STAGES": 4, "ASSEMBLY": True,
    }  # fmt: skip
    types = {"a": "*fp8e4nv", "a_scale": "*fp32", "b": "*fp8e4nv", "b_scale": "*fp32", "out": "*fp32"}
    made = compiled(fp8_small_m._partial_sums, constants, types, {"num_warps": 4})
    ptx, instruction = made.asm["ptx"], "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
    assert made.asm["cubin"] and instruction in ptx and "cp.async.cg.shared.global" in ptx
    assert "st.shared" not in ptx[: ptx.rindex(instruction)]
    # There are eight products of 256 columns, of which every fourth begins a sum anew.
    assert ptx.count(instruction) == 8 and "add.f32" in ptx[ptx.index(instruction) : ptx.rindex(instruction)]
    assert not re.search(TOUCHES, ptx[: ptx.index("griddepcontrol.wait")])
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.rindex(instruction)


REGISTERED = """
from unittest.mock import patch
import torch
from te_inductor import lowerings
from te_inductor.recipes import NVFP4WeightOnly
from te_inductor.ops.stored_weight import NVFP4Weight

kernel = torch._C._dispatch_has_kernel_for_dispatch_key
with patch.object(torch.cuda, "is_available", lambda: True):
    lowerings.install()
assert kernel("te_inductor::decode_attention", "CUDA") and hasattr(torch.ops.te_inductor, "fp8_partial_sums")
assert not kernel("te_inductor::nvfp4_linear", "CUDA")
with torch._subclasses.FakeTensorMode():
    parts = [torch.empty(8, 8, device="cuda") for _ in range(3)]
    NVFP4Weight(parts, torch.Size((8, 16)), torch.bfloat16, NVFP4WeightOnly())
assert kernel("te_inductor::nvfp4_linear", "CUDA") and hasattr(torch.ops.te_inductor, "nvfp4_partial_sums")
"""


def test_registered():
    """No lowering, where a compile cache returns code, runs that could import the kernels it calls. NVFP4's, in Gluon,
    are for its weights alone to import."""
    done = PROGRAMS.run("-c", REGISTERED)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.quick("decode_fp8")
@pytest.mark.parametrize("case", ["decode_fp8", "decode_fp8_dynamic", "batch_fp8"])
def test_generated(case):
    """A step of generation: the kernel for each layer, and kernels that start early around them."""
    code = generate(case, 90)
    [source] = code.sources
    assert source.count("fp8_partial_sums.default(") == 3 and "_scaled_mm(" not in source
    # The norm and the cast of rows of 4096; SwiGLU and that of 14336; the residual.
    assert [kernel.name.count("quantize") for kernel in code.kernels] == [1, 1, 0]
    for kernel in code.kernels:  # Note [Kernels that start early]
        before, wait, _ = kernel.body.partition("tl.extra.cuda.gdc_wait()")
        assert wait and "tl." not in before.replace("tl.constexpr", "") and kernel.meta["launch_pdl"]


def test_more_rows():
    """The kernel has, between 65 and 256 rows, the layers whose tiles are few; here the last of three."""
    code, gate, down = generate("narrow_fp8", 90), (100, 14336, 4096), (100, 4096, 14336)
    [source] = code.sources
    assert small_m.pays(*down) and not small_m.pays(*gate)
    assert source.count("fp8_partial_sums.default(") == 1 and source.count("extern_kernels._scaled_mm(") == 2
    config = small_m.cut(*down)
    assert f"Config(rows={config.rows}, block_k={config.block_k}, splits={config.splits}, stages=" in source
    assert all(kernel.meta["launch_pdl"] for kernel in code.kernels)


@pytest.mark.thorough
def test_training_starts_nothing_early():
    """One narrow layer of more than a few rows does not change how the other kernels of a training graph start."""
    code = generate("narrow_fp8_training", 90)
    assert small_m.pays(200, 2560, 4096) and "fp8_partial_sums.default(" in code.sources[0]
    assert code.kernels and not any(kernel.meta.get("launch_pdl") for kernel in code.kernels)
