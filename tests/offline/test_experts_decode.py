"""Experts' stored weights without a GPU: the kernels interpreted, as cubins, and in generated code."""

import re

import numpy as np
import pytest
import torch

from te_inductor.kernels.experts_decode import cut
from tests.offline.harness import INTERPRETER, generate
from tests.support.cuda_code import TOUCHES, compiled

triton = pytest.importorskip("triton")

from te_inductor.runtime.eager import experts  # noqa: E402
from te_inductor.templates.triton import experts_decode  # noqa: E402


@pytest.mark.skipif(
    triton.__version__ < "3.7" and np.__version__ >= "2.4",
    reason="Triton 3.6 makes an int of an array, numpy 2.4 does not",
)
def test_interpreted():
    """The reference is float64: groups of any size, rows of none, experts by number, edges of all three sizes, all
    scales."""
    done = INTERPRETER.run("tests.offline.experts_kernels")
    assert done.returncode == 0, done.stderr[-3000:]


CUBINS = [("_nvfp4", 16, 256, False), ("_nvfp4", 64, 128, True), ("_fp8", 16, 128, True), ("_fp8", 64, 128, False)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kernel", "rows", "block_k", "ids"), CUBINS)
def test_cubin(kernel, rows, block_k, ids):
    """The weight comes to shared memory by itself, is made bf16 in registers, and multiplied there; nothing is read
    before the wait."""
    constants = {
        "IDS": ids, "GROUPS": 128, "ROWS": rows, "BLOCK_N": experts_decode.BLOCK_N, "BLOCK_K": block_k, "STAGES": 3,
        "STORED": 2048, "EVEN": True, "X_COLUMN": 1, "X_ROW": 2048, "ASSEMBLY": True,
        **({"FACTOR": experts_decode.FACTOR} if kernel == "_nvfp4" else {"SCOPE": 1}),
    }  # fmt: skip
    types = {"x": "*bf16", "groups": "*i64" if ids else "*i32", "out": "*bf16"}
    types |= (
        {"stored": "*i16", "block_scale": "*u8", "tensor_scale": "*fp32"}
        if kernel == "_nvfp4"
        else {"stored": "*fp8e4nv", "scale_inv": "*fp32"}
    )
    made = compiled(getattr(experts_decode, kernel), constants, types, {"num_warps": 4})
    ptx, instruction = made.asm["ptx"], f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    assert made.asm["cubin"] and instruction in ptx and "cp.async" in ptx
    assert made.metadata.shared <= 113 * 1024  # two programs on a multiprocessor
    assert not re.search(TOUCHES, ptx[: ptx.index("griddepcontrol.wait")])


def test_configs():
    """Every number of rows is cut into tiles that a program takes, of which there are enough."""
    for count in (1, 4, 8, 128, 256):
        for m in (1, 2, 7, 8, 64, 512, 4096):
            for nvfp4, by_ids in ((True, False), (False, False), (True, True)):
                config = cut(m, count, 2048, nvfp4, by_ids)
                assert config.rows in (16, 32, 64) and config.block_k in (128, 256)
            for _ in range(5):
                sizes = torch.bincount(torch.randint(0, count, (m,)), minlength=count)
                wanted = (-(-sizes // config.rows)).sum()
                assert wanted <= experts_decode.tiles(m, count, config.rows) <= m


def test_sorted_by_expert():
    ids = torch.tensor([3, 0, 3, 5, 0])
    order, ends = experts.sorted_by_expert(ids, 6)
    assert order.tolist() == [1, 4, 0, 2, 3] and ends.tolist() == [2, 2, 2, 4, 4, 5] and ends.dtype == torch.int32


HOST = ("_local_scalar_dense", ".item()", ".tolist()", "synchronize")


@pytest.mark.parametrize(
    "case",
    [
        "decode_experts_nvfp4",
        "decode_picked_fp8",
        pytest.param("decode_picked_nvfp4", marks=pytest.mark.thorough),
    ],
)
def test_generated(case):
    """A step of generation: two products, of what is stored. Nothing waits for the host, nothing is written out."""
    [source] = generate(case, 90).sources
    product = f"torch.ops.te_inductor.{case.split('_')[2]}_experts.default("
    assert source.count(product) == 2 and "dequantize" not in source and "bmm(" not in source
    assert not any(call in source for call in HOST)


@pytest.mark.thorough
def test_prompts():
    """Many rows: FP8 weights by a grouped product in FP8, NVFP4 ones in bf16."""
    [source] = generate("prompt_experts_fp8", 90).sources
    assert source.count("te_inductor.grouped_mm.default(") == 2 and "fp8_experts" not in source
    [source] = generate("prompt_experts_nvfp4", 90).sources
    assert source.count("nvfp4_experts_dequantize.default(") == 2 and source.count("_grouped_mm") >= 2
    [source] = generate("decode_experts_dynamic", 90).sources
    assert source.count("te_inductor.fp8_experts.default(") == 2
    assert not any(call in source for call in HOST)
