"""Products whose sums are made in one order, without a GPU: interpreted, as cubins, and in generated code."""

import re

import pytest

from te_inductor.kernels.fixed_order import cut
from te_inductor.runtime.eager.fixed_order import BLOCK
from tests.offline.harness import INTERPRETER, Generated, compile_to_cubin, generate
from tests.support.cuda_code import compiled, spilled

pytest.importorskip("triton")
SUMMED_ROW = {"XBLOCK": 1, "R0_BLOCK": 1024, "num_warps": 4}
OPERANDS = {"fp8e4nv": 1, "bf16": 2}


def test_interpreted():
    done = INTERPRETER.run("tests.offline.fixed_order_kernels")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("scales", "turned"), [(0, False), (0, True), (1, False), (2, False)])
@pytest.mark.parametrize("n", [1024, 32768])
def test_cubin(n, scales, turned):
    """Hopper's instructions of 64 rows multiply, as often as the tile says, each over all of the tile's columns."""
    from te_inductor.templates.triton.fixed_order import _fixed_mm

    dtype = "bf16" if scales == 0 else "fp8e4nv"
    config = cut(n, OPERANDS[dtype])
    constants = {
        "SCALES": scales, "OF_ROWS": (True, True), "ROWS": config.rows, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "STAGES": config.stages, "TURNED": turned,
    }  # fmt: skip
    types = {"a": f"*{dtype}", "a_scale": "*fp32", "b": f"*{dtype}", "b_scale": "*fp32", "out": "*bf16"}
    made = compiled(_fixed_mm, constants, types, {"num_warps": config.warps}, multiples=("N", "K"))
    step = 32 // OPERANDS[dtype]
    found = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k{step}", made.asm["ptx"])
    assert sum(map(int, found)) == config.block_n * config.block_k // step
    assert spilled(made) == 0 and config.block_k * OPERANDS[dtype] == BLOCK


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_generated_code_sums_rows_alike(recipe):
    """The forward of a step that trains, and an evaluation of another number of rows: products are of one kernel, sums of
    rows have one tile."""
    for case in (f"invariant_{recipe}_train", f"invariant_{recipe}_decode"):
        made = generate(case, 90)
        forward = Generated(made.sources[:1])
        assert not re.search(r"extern_kernels\.\w*mm|aten\._scaled_mm", forward.sources[0]), case
        assert len(re.findall(r"fixed_mm(?:\.default)?\(", forward.sources[0])) == 3, case
        sums = [kernel for kernel in forward.kernels if re.search(r"tl\.sum\(|welford", kernel.body)]
        assert len(sums) >= 2 and all(kernel.tile == SUMMED_ROW for kernel in sums), case
        assert all(kernel.meta.get("enable_fp_fusion") is False for kernel in forward.kernels), case


def test_scales_of_blocks_of_one_row_compile(tmp_path):
    """A decoded token is a matrix of one row, whose position is no part of where its scales are stored."""
    kernels = generate("invariant_block_of_one", 90).kernels
    stores = [kernel for kernel in kernels if "xoffset // 128" in kernel.body and "ymask)" in kernel.body]
    assert stores
    for kernel in stores:
        compile_to_cubin(kernel, 90, tmp_path)
