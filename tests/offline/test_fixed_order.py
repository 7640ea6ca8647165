"""Products whose sums are made in one order, without a GPU: interpreted, as cubins, and in generated code."""

import re
from dataclasses import replace

import pytest

from te_inductor.kernels.fixed_order import EXACT, TILES, config_of, cut
from te_inductor.runtime.eager.fixed_order import BLOCK
from te_inductor.targets import sm90
from tests.offline.harness import INTERPRETER, Generated, compile_to_cubin, generate
from tests.support.cuda_code import compiled, spilled

pytest.importorskip("triton")
SUMMED_ROW = {"XBLOCK": 1, "R0_BLOCK": 1024, "num_warps": 4}
OPERANDS = {"fp8e4nv": 1, "bf16": 2}


def test_interpreted():
    done = INTERPRETER.run("tests.offline.fixed_order_kernels")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("scales", "turned"), [(0, False), (0, True), (1, False), (2, False)])
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_cubin(tile, scales, turned):
    """Hopper's instructions of 64 rows multiply, as often as the tile says, each over all of the tile's columns, and the
    sums of FP8 are added to one each 128 columns."""
    from te_inductor.templates.triton.fixed_order import _fixed_mm

    dtype = "bf16" if scales == 0 else "fp8e4nv"
    config = config_of(sm90.LIMITS, tile, 4096, OPERANDS[dtype], scales == 2)
    constants = {
        "SCALES": scales, "OF_ROWS": (True, True), "ROWS": config.rows, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "STAGES": config.stages, "TURNED": turned,
    }  # fmt: skip
    types = {"a": f"*{dtype}", "a_scale": "*fp32", "b": f"*{dtype}", "b_scale": "*fp32", "out": "*bf16"}
    made = compiled(_fixed_mm, constants, types, {"num_warps": config.warps}, multiples=("N", "K"))
    step = 32 // OPERANDS[dtype]
    found = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k{step}\..*, (0|%p\d+), 1, 1", made.asm["ptx"])
    assert [columns for columns, _ in found] == [str(config.block_n)] * (config.block_k // step)
    assert config.rows * 2 == config.warps * 32  # an instruction of a step for each 128 threads
    if dtype == "fp8e4nv":  # each fourth begins a sum
        assert [begins == "0" for _, begins in found] == [True, False, False, False] * (config.block_k // BLOCK)
    assert spilled(made) == 0 and config.block_k * OPERANDS[dtype] % BLOCK == 0
    assert made.metadata.shared <= sm90.LIMITS.shared_memory


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((1, 4096, 4096, 2048), (128, 128, 128)),
        ((1, 64, 12288, 2048), (64, 64, 128)),
        ((1, 16, 4096, 2048), (64, 32, 256)),
        ((1, 1, 2048, 6144), (64, 16, 256)),
        ((1, 1, 2048, 6144 + 128), (64, 16, 128)),  # which 256 do not divide
        ((1, 100, 2048, 6144), (64, 32, 256)),
        ((8, 128, 2048, 128), (128, 128, 128)),
    ],
)
def test_few_rows_are_cut_into_more_programs(sizes, tile):
    config = cut(sm90.LIMITS, *sizes, 1, False)
    assert (config.rows, config.block_n, config.block_k) == tile
    assert cut(sm90.LIMITS, *sizes, 1, True).block_k == 128
    assert cut(sm90.LIMITS, *sizes, 2, False).block_k == (64 if config.block_k == 128 and sizes[-1] != 6272 else 128)
    assert cut(sm90.LIMITS, *sizes, 4, False) == EXACT and config.stages <= max(2, sizes[-1] // config.block_k)
    small = cut(replace(sm90.LIMITS, shared_memory=100 << 10), *sizes, 1, False)
    assert small.stages * (small.rows + small.block_n) * small.block_k < 100 << 10


@pytest.mark.quick("block")
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


def test_attention_is_two_products_and_torchs_backward():
    forward, backward = generate("invariant_attention_train", 90).sources
    assert len(re.findall(r"fixed_mm(?:\.default)?\(", forward)) == 2 and "bmm" not in forward + backward
    assert len(re.findall(r"attention_gradients(?:\.default)?\(", backward)) == 1


def test_rows_are_reduced_in_one_layout(tmp_path):
    """The mask of a step of generation may be read in words, where a prompt's may not: Note [One layout]."""
    layouts = set()
    for name in ("train", "prefill", "decode"):
        forward = Generated(generate(f"invariant_softmax_{name}", 90).sources[:1])
        [kernel] = [kernel for kernel in forward.kernels if "tl.sum(" in kernel.body]
        code = compile_to_cubin(kernel, 90, tmp_path).asm["ttgir"]
        [operand] = set(re.findall(r"\(tensor<1x1024xf32, #(\w+)>\) ->", code))
        layouts |= set(re.findall(rf"^#{operand} = (.*)$", code, re.MULTILINE))
    assert len(layouts) == 1, layouts


def test_scales_of_blocks_of_one_row_compile(tmp_path):
    """A decoded token is a matrix of one row, whose position is no part of where its scales are stored."""
    kernels = generate("invariant_block_of_one", 90).kernels
    stores = [kernel for kernel in kernels if "xoffset // 128" in kernel.body and "ymask)" in kernel.body]
    assert stores
    for kernel in stores:
        compile_to_cubin(kernel, 90, tmp_path)
