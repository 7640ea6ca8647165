"""The code for scales of blocks on Hopper: one kernel a tensor, and scales that cuBLASLt reads as they were written."""

import re
from pathlib import Path

import pytest
import torch

from te_inductor import ops
from te_inductor.lowerings.codegen.block_tiles import TILE
from te_inductor.lowerings.codegen.tiles import BLOCK_WARPS, COLUMNS_ALONE
from te_inductor.recipes import Quantizer
from tests.offline.harness import Generated, compile_to_cubin, generate
from tests.support.interpreted import interpret


@pytest.fixture
def training() -> Generated:
    return generate("mlp_training_block", 90)


def calls(source: str) -> list[str]:
    return [line for line in source.splitlines() if "extern_kernels._scaled_mm(" in line]


def views(source: str, call: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Size and strides of each tensor argument of a GEMM, a, b and their scales first."""
    arguments = call[call.index("_scaled_mm(") + len("_scaled_mm(") :]
    view = r"reinterpret_tensor\(\w+, \(([\d, ]*)\), \(([\d, ]*)\), 0\)"
    found = []
    for match in re.finditer(rf"{view}|\b(buf\d+|primals_\d+|getitem_\d+)\b", arguments):
        size, strides, name = match.groups()
        if name is not None:
            while reused := re.search(rf"\b{name} = (\w+); del \1  # reuse", source):
                name = reused.group(1)
            born = rf"(?:\b{name} = empty_strided_cuda\(|assert_size_stride\({name}, )"
            made = re.search(rf"{born}\(([\d, ]*)\), \(([\d, ]*)\)", source)
            assert made is not None, (name, call)
            size, strides = made.groups()
        found.append(tuple(tuple(int(x) for x in part.split(",") if x.strip()) for part in (size, strides)))
    return found


def check_scales(source: str, b_is_square: bool, row_multiple: int) -> None:
    """a: (M, K/128), contiguous along M; b transposed: (K/128, N) contiguous along N, or (K/128, N/128) along K."""
    for call in calls(source):
        (m, k), (_, n) = (size for size, _ in views(source, call)[:2])
        a_scale, b_scale = views(source, call)[2:4]
        assert m % row_multiple == 0 and n % 16 == 0 and k % 128 == 0
        assert a_scale == ((m, k // 128), (1, m))
        square = ((k // 128, n // 128), (1, k // 128))
        assert b_scale == (square if b_is_square else ((k // 128, n), (n, 1))), call


def test_every_gemm_gets_scales_of_blocks(training: Generated) -> None:
    forward, backward = training.sources
    assert len(calls(forward)) == 2 and len(calls(backward)) == 4  # gate and up are one
    for source in training.sources:
        assert "extern_kernels.mm(" not in source and "extern_kernels.addmm(" not in source
        assert source.count("use_fast_accum=False") == len(calls(source))
    check_scales(forward, b_is_square=True, row_multiple=16)
    dgrads = [call for call in calls(backward) if views(backward, call)[0][0][0] == 16384]
    assert len(dgrads) == 2
    for call in calls(backward):
        check_scales(_only(backward, call), call in dgrads, 16)


def _only(source: str, call: str) -> str:
    """The source without the other GEMMs."""
    return "\n".join(line for line in source.splitlines() if "_scaled_mm(" not in line or line == call)


def test_both_copies_are_one_kernel(training: Generated) -> None:
    """Amaxes, scales and casts of a tensor from one read of what makes it, in tiles that are blocks."""
    casts = [
        k for k in training.kernels if "tl.float8" in k.body and [*k.meta["signature"].values()].count("*fp8e4nv") > 1
    ]
    assert len(casts) == 1 + 2 + 3  # SwiGLU; weights (gate's and up's is one); dy, and SwiGLU's two gradients
    for kernel in casts:
        assert kernel.tile["XBLOCK"] == kernel.tile["YBLOCK"] == TILE and "r0_numel" not in kernel.meta["signature"]
        loads = re.findall(r"tl\.load\(.*", kernel.body)
        assert len(loads) == len(set(loads)) and kernel.body.count("tl.store(") == 4
        pointers = [kind for kind in kernel.meta["signature"].values() if kind.startswith("*")]
        assert pointers.count("*fp8e4nv") == 2
        assert kernel.tile["num_warps"] == BLOCK_WARPS


def test_a_norm_writes_its_row_copy_from_one_read(training: Generated) -> None:
    """The norm's own kernel does, a row a program; its column copy, in tiles, is the backward's, and the forward saves
    none."""
    forward, backward = training.sources
    norm = training.kernel("mean")
    assert norm.tile == {"XBLOCK": 1, "num_warps": 4} and "quantize_rowcol" in norm.name
    assert norm.body.count("tl.load(") == 2 and norm.body.count("tl.store(") == 3  # x, weight; statistic, data, scales
    [column] = [k for k in training.kernels if k.name in backward and "mul_quantize_rowcol" in k.name]
    assert (column.tile["XBLOCK"], column.tile["YBLOCK"]) == (COLUMNS_ALONE[0], TILE)
    assert column.body.count("tl.load(") == 3 and column.body.count("tl.store(") == 2
    copy = "empty_strided_cuda((16384, 4096), (1, 16384), torch.float8_e4m3fn)"
    assert forward.count(copy) == 0 and backward.count(copy) == 2  # the norm's, dy's


def test_inference_makes_row_copies_alone() -> None:
    """Copies are in tiles that are blocks, too, of loops that are one; a norm's in its own kernel."""
    generated = generate("mlp_inference_block", 90)
    [source] = generated.sources
    assert len(calls(source)) == 2 and "extern_kernels.mm(" not in source
    casts = [kernel for kernel in generated.kernels if "tl.float8" in kernel.body]
    for kernel in casts:
        kinds = list(kernel.meta["signature"].values())
        assert kinds.count("*fp8e4nv") == 1, kernel.name
    tiled = [kernel for kernel in casts if kernel.tile is not None and kernel.tile.get("XBLOCK") == TILE]
    assert len(tiled) == 2  # of gate's and up's weight, and of down's
    norm = generated.kernel("mean", "quantize")
    assert norm.tile == {"XBLOCK": 1, "num_warps": 4} and norm.body.count("tl.load(") == 2


def test_a_symbolic_number_of_rows_is_held(tmp_path: Path) -> None:
    [kernel] = generate("rows_of_blocks_dynamic", 90).kernels
    assert kernel.tile is not None and kernel.tile["XBLOCK"] == 1 and kernel.body.count("tl.load(") == 1
    assert len(compile_to_cubin(kernel, 90, tmp_path).asm["cubin"]) > 0


def test_a_cast_joins_a_sum_of_its_rows(tmp_path: Path) -> None:
    """One kernel reads the tensor, once, and makes the bits that the op makes."""
    generated = generate("rows_of_blocks_beside_a_sum", 90)
    [kernel] = generated.kernels
    assert kernel.body.count("tl.load(") == 1
    x = torch.randn(128, 1280, dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 200] = 0.0, torch.inf, torch.nan
    [(_, data, scale_inv)] = interpret(generated.sources[0], [[x]], tmp_path)
    expected, expected_inv = ops.quantize(x.abs(), Quantizer("e4m3", scope="1x128"))
    assert torch.equal(expected.float().isnan().sum(1)[:4], torch.tensor([0, 1, 1, 0]))
    assert torch.allclose(data.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scale_inv, expected_inv)


def test_no_scale_is_stored_behind_the_last_block(tmp_path: Path) -> None:
    """Rows over two axes of a grid have programs behind them."""
    [kernel] = generate("two_way_cast_block_long", 90).kernels
    assert "tl.program_id(2)" in kernel.body
    stores = [line for line in kernel.body.splitlines() if "tl.store(" in line]
    assert len(stores) == 4 and all("< ynumel" in line or "ymask" in line for line in stores)
    assert len(compile_to_cubin(kernel, 90, tmp_path).asm["cubin"]) > 0


def test_magnitudes_are_integers(training: Generated) -> None:
    """There is, beside an fp8 store, no max or min but one of int32, as tests/offline/test_mlp.py asks of other
    recipes."""
    for kernel in training.kernels:
        if "tl.float8" in kernel.body:
            assert "minimum" not in kernel.body and "triton_helpers.max" not in kernel.body, kernel.name
            for found in re.findall(r"tl\.max\((?:tl\.max\(|tl\.reshape\()?tl\.broadcast_to\((\w+),", kernel.body):
                assert re.search(rf"{found} = tmp\d+ & tmp\d+\n", kernel.body), kernel.name


def test_a_sigmoid_is_two_approximations(training: Generated, tmp_path: Path) -> None:
    """No division, nor what surrounds one for the sake of the largest and smallest numbers."""
    ptx = [
        compile_to_cubin(k, 90, tmp_path).asm["ptx"]
        for k in training.kernels
        if "silu" in k.name or "sigmoid" in k.name
    ]
    assert len(ptx) == 3  # SwiGLU's output and its two gradients
    for text in ptx:
        assert "rcp.approx.ftz.f32" in text and "ex2.approx.ftz.f32" in text and "div" not in text


def test_every_kernel_compiles(training: Generated, tmp_path: Path) -> None:
    for kernel in training.kernels:
        compiled = compile_to_cubin(kernel, 90, tmp_path)
        assert len(compiled.asm["cubin"]) > 0
        if "tl.float8" in kernel.body:
            assert "cvt.rn.satfinite.e" in compiled.asm["ptx"], kernel.name


@pytest.mark.quick("linear_block")
@pytest.mark.parametrize("case", ["linear_block", "linear_block_max_autotune"])
def test_square_scales_of_whole_sixteen_bytes(case: str) -> None:
    """K/128 = 4 in fprop and 8 in dgrad: as they are. cuBLASLt also under max-autotune; a bf16 bias is its epilogue."""
    forward, backward = generate(case, 90).sources
    check_scales(forward, b_is_square=True, row_multiple=16)
    dgrad, wgrad = calls(backward)
    check_scales(_only(backward, dgrad), b_is_square=True, row_multiple=16)
    check_scales(_only(backward, wgrad), b_is_square=False, row_multiple=16)
    assert len(views(forward, calls(forward)[0])) == 6  # a, b, their scales, bias, out


@pytest.mark.thorough
def test_other_sizes_and_dtypes(tmp_path: Path) -> None:
    """M = 130 becomes 132 and N = 504 becomes 512; scales of square blocks are spread where K/128 is 6, and not where
    it is 4; fp32 results come from the library."""
    generated = generate("linear_block_fp32", 90)
    forward, backward = generated.sources
    check_scales(forward, b_is_square=False, row_multiple=4)
    assert "(132, 768)" in forward and "(768, 512)" in calls(forward)[0]
    dgrad, wgrad = calls(backward)
    check_scales(_only(backward, dgrad), b_is_square=True, row_multiple=4)
    assert views(backward, wgrad)[2:4] == [((504, 2), (1, 504)), ((2, 768), (768, 1))]
    assert all("out_dtype=torch.float32" in call for source in (forward, backward) for call in calls(source))
    for kernel in generated.kernels:
        assert len(compile_to_cubin(kernel, 90, tmp_path).asm["cubin"]) > 0


@pytest.mark.thorough
def test_one_block_is_a_row(tmp_path: Path) -> None:
    """Scales that do not change along K are those of rows: fp16 results are scaled outside, as they are there."""
    generated = generate("linear_block_one", 90)
    for source in generated.sources:
        assert re.search(
            r"= (empty_strided_cuda\(\(\), \(\), torch.float32\)|reinterpret_tensor\(\w+, \(\), \(\), 0\))", source
        )
        assert all(re.search(r", (buf\d+), \1, out_dtype=torch.float32", call) for call in calls(source))
    for kernel in generated.kernels:
        assert len(compile_to_cubin(kernel, 90, tmp_path).asm["cubin"]) > 0


@pytest.mark.thorough
def test_a_symbolic_batch(tmp_path: Path) -> None:
    """Nothing is said of M: it may be no multiple of 4, and it is some number of blocks."""
    generated = generate("linear_block_dynamic", 90)
    forward, backward = generated.sources
    assert len(calls(forward)) == 1 and len(calls(backward)) == 2
    [symbol] = set(re.findall(r"\bs\d+\b", calls(backward)[1]))
    rows, blocks = f"4*((3 + {symbol}) // 4)", f"((127 + {symbol}) // 128)"
    assert rows in calls(forward)[0], calls(forward)
    assert blocks in calls(backward)[1], calls(backward)
    for kernel in generated.kernels:
        assert len(compile_to_cubin(kernel, 90, tmp_path).asm["cubin"]) > 0


def test_blackwell_stays_in_high_precision() -> None:
    """cuBLASLt has no such scales there; the casts themselves are device code like any other, `test_casts_compile`."""
    forward, _ = generate("linear_block", 100).sources
    assert "extern_kernels.addmm(" in forward and "float8" not in forward


CASTS = ["two_way_cast_block", "two_way_cast_block_padded", "two_way_cast_squares", "two_way_cast_squares_padded"]


@pytest.mark.quick("two_way_cast_block-sm_90", "two_way_cast_squares_padded-sm_90", "two_way_cast_block-sm_100")
@pytest.mark.parametrize("arch", [90, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("case", [*CASTS, "columnwise_cast_block"])
def test_casts_compile(case: str, arch: int, tmp_path: Path) -> None:
    generated = generate(case, arch)
    for kernel in generated.kernels:
        assert len(compile_to_cubin(kernel, arch, tmp_path).asm["cubin"]) > 0
    if case == "two_way_cast_block_padded":
        assert len(generated.kernels) == 2
    elif "padded" not in case:
        assert len(generated.kernels) == 1


@pytest.mark.thorough
def test_a_scale_is_spread_over_its_rows() -> None:
    """Inductor would take [i // 128] for a permutation and write at 128 * i (`loop_index_inversion_in_fusion`)."""
    kernels = generate("linear_block_of_one_column", 90).kernels
    spread = [kernel for kernel in kernels if re.search(r"tl\.load\(in_ptr0 \+ x0 // 128", kernel.body)]
    assert spread and all("tl.store(out_ptr0 + x0," in kernel.body for kernel in spread)
    assert not any("tl.store(out_ptr0 + 128 * x0" in kernel.body for kernel in kernels)
