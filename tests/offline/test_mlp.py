"""The code for a transformer's MLP on Hopper and Blackwell: which kernels, which layouts, and that they compile."""

import re
from pathlib import Path

import pytest

from te_inductor.lowerings.codegen.tiles import AMAX, CAST, PAIRED
from tests.offline.harness import Generated, compile_to_cubin, generate

ARCHS = (90, pytest.param(100, marks=pytest.mark.thorough))


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["mlp_training", "mlp_training_rowwise"])
def training(arch: int, request: pytest.FixtureRequest) -> Generated:
    return generate(request.param, arch)


@pytest.fixture
def current(arch: int) -> Generated:
    return generate("mlp_training", arch)


@pytest.fixture
def rowwise(arch: int) -> Generated:
    return generate("mlp_training_rowwise", arch)


def test_every_gemm_is_an_fp8_gemm(training: Generated) -> None:
    """There is one of gate and up together, and one of down."""
    forward, backward = training.sources
    assert forward.count("extern_kernels._scaled_mm(") == 2
    assert backward.count("extern_kernels._scaled_mm(") == 4
    for source in (forward, backward):
        assert "extern_kernels.mm(" not in source and "extern_kernels.addmm(" not in source
    assert forward.count("use_fast_accum=True") == 2
    assert backward.count("use_fast_accum=False") == 4


def test_the_gradients_of_gate_and_up_are_cast_where_they_are_computed(arch: int) -> None:
    """Holds also where gate and up are saved as codes with scales, two reads for one: no gradient is written first."""
    for case in ("mlp_training_delayed", "mlp_training_saved"):
        _, backward = generate(case, arch).sources
        [gradients] = [name for name in re.findall(r"(\S+)\.run\(", backward) if "sigmoid" in name]
        assert "quantize_pieces" in gradients


@pytest.mark.parametrize("case", ["mlp_training_saved", "clamped_mlp_saved"])
def test_gate_and_up_are_saved_by_the_kernel_that_reads_them(case: str, arch: int) -> None:
    """Both are cast where SwiGLU reads them, and where a clamp compares: the GEMM's output is read by one kernel, as
    without codes."""
    forward, _ = generate(case, arch).sources
    gate_up = re.search(r"extern_kernels\._scaled_mm\(.*out=(\w+)\)", forward)[1]
    readers = [call for call in re.findall(r"triton_\w+\.run\(.*\)", forward) if re.search(rf"\b{gate_up}\b", call)]
    assert len(readers) == 1 and ("silu" in readers[0] or "sigmoid" in readers[0]), readers


def test_a_stream_is_saved_by_the_norm_that_reads_it(arch: int) -> None:
    """The second norm's kernel writes its output's copy, codes of its input and the sum itself, of one read, so that the
    next sum does not add up the terms of all before it."""
    forward, _ = generate("two_mlps_saved_low", arch).sources
    sources = dict(re.findall(r"^def (triton_\w+)\((.*?)^''', device_str", forward, re.MULTILINE | re.DOTALL))
    writes = sorted(body.count(".to(tl.float8e4nv)") for name, body in sources.items() if "rsqrt" in name)
    assert writes == [1, 2], writes
    last = re.findall(r"triton_\w*add\w*\.run\((.*), stream", forward)[-1]
    assert len(re.findall(r"\b(?:buf|primals_)\d+", last)) == 2, last  # the sum and what is added, in place


def test_operands_are_k_major(training: Generated) -> None:
    """cuBLASLt reads fp8 operands with the contraction dimension contiguous; any other layout is refused at run
    time."""
    for source in training.sources:
        for line in source.splitlines():
            if "empty_strided_cuda(" in line and "float8" in line:
                strides = line.split("), (")[1].split(")")[0].split(", ")
                assert strides[-1] == "1", line


def test_an_amax_reads_whole_tiles(arch: int) -> None:
    """Each program a part that begins at a vector's end, without masks, so that loads are vectors."""
    look, _ = generate("amax_of_swiglu", arch).kernels
    [programs] = re.findall(r"xnumel = (\d+)\n", look.body)
    elements, left = divmod(16384 * 8192, int(programs))
    assert left == 0 and elements % AMAX["R0_BLOCK"] == 0 and 264 < int(programs) < 1056
    loads = re.findall(r"tl\.load\(.*", look.body)
    assert len(loads) == 2 and not any("mask" in load or "other" in load for load in loads)


def test_gate_and_up_are_one_gemm(training: Generated) -> None:
    forward, backward = training.sources
    assert "(4096, 28672), (1, 4096), 0)" in forward  # fprop: both weights are b
    assert "(28672, 4096), (1, 28672), 0)" in backward  # dgrad: both gradients are a
    assert "aten.cat" not in forward.split("async_compile.wait")[1]  # nothing is copied together


def test_only_the_quantized_copies_are_saved(training: Generated) -> None:
    """The bf16 tensors that forward returns are the MLP's output, its input, and gate and up, which SwiGLU's backward
    reads; the normalized input and SwiGLU's output are kept as fp8 columnwise copies alone."""
    forward = training.sources[0]
    returned = forward.split("return (")[1].split(")")[0].split(", ")
    made = {
        line.split(" = ")[0].strip(): line
        for line in forward.splitlines()
        if "empty_strided_cuda(" in line or "reinterpret_tensor(" in line
    }
    wide = [name for name in returned if name in made and "bfloat16" in made[name] and "16384" in made[name]]
    assert len(wide) <= 3, wide


def test_the_backward_casts_the_column_copies_of_weights(current: Generated) -> None:
    """The copies are those of gate and up, which are one, and of down; nothing is kept but the weights themselves, no
    copy is made twice."""
    forward, backward = (
        re.findall(r"empty_strided_cuda\((\(\d+, \d+\)), .*float8", source) for source in current.sources
    )
    assert forward.count("(28672, 4096)") == 1 and backward.count("(28672, 4096)") == 0
    assert forward.count("(4096, 28672)") == 0 and backward.count("(4096, 28672)") == 1
    assert forward.count("(14336, 4096)") == 0 and backward.count("(14336, 4096)") == 1


def test_column_copies_are_written_by_the_backward(current: Generated) -> None:
    """SwiGLU's from the reads of its own gradient, and the norm's, by a kernel beside the norm's backward."""
    forward, backward = (
        [line for line in source.splitlines() if "empty_strided_cuda(" in line and "float8" in line]
        for source in current.sources
    )
    activation, normalized = "((14336, 16384)", "((4096, 16384)"
    for copy in (activation, normalized):
        assert not any(copy in line for line in forward) and any(copy in line for line in backward)


def test_kernels_have_the_tiles_that_were_measured(current: Generated) -> None:
    """Tiles lie along the dimension in which the tensors that a kernel reads are contiguous, whether that is its x or
    its y."""
    casts = [kernel for kernel in current.kernels if "YBLOCK" in kernel.meta["signature"]]
    assert len(casts) >= 5
    for kernel in casts:
        read = next(line for line in kernel.body.splitlines() if "tl.load(in_ptr0 +" in line)
        outer = "(y0 +" in read  # the index of a contiguous dimension has no factor
        tensors = kernel.body.count("tl.load(in") - kernel.body.count("tl.broadcast_to(")
        along, across = ("YBLOCK", "XBLOCK") if outer else ("XBLOCK", "YBLOCK")
        assert kernel.tile in [
            {along: a, across: b, "num_warps": w} for a, b, w in (*CAST.values(), *PAIRED.values())
        ], kernel.name
        if tensors == 1:
            assert (kernel.tile[along], kernel.tile[across], kernel.tile["num_warps"]) == CAST[1]
    amaxes = [kernel for kernel in current.kernels if kernel.tile == AMAX]
    assert len(amaxes) == 4  # weights (one kernel for all three), SwiGLU, dy, SwiGLU's backward


def test_rows_are_held_where_they_fit(rowwise: Generated) -> None:
    """A norm and its rows' amaxes, a weight of 4096 columns and its row copy: one read; other amaxes of rows, which may
    run across the dimension in which the tensor is contiguous, have no tile of ours."""
    reductions = [kernel for kernel in rowwise.kernels if "r0_numel" in kernel.meta["signature"]]
    held = [kernel for kernel in reductions if kernel.tile is not None]
    assert len(held) >= 2 and len(held) < len(reductions)
    for kernel in held:
        assert kernel.tile == {"XBLOCK": 1, "num_warps": 4}, kernel.name
        assert "r0_numel = 4096" in kernel.body and "for r0_offset" not in kernel.body, kernel.name


def test_gemms_get_one_scale_a_row(rowwise: Generated) -> None:
    """M scales of shape (M, 1) and N of shape (1, N), contiguous fp32 both."""
    for source in rowwise.sources:
        calls = re.findall(
            r"_scaled_mm\((\w+), reinterpret_tensor\(\w+, \((\d+), (\d+)\), .*?\), (\w+), "
            r"reinterpret_tensor\(\w+, \(1, (\d+)\), \(\d+, 1\), 0\), out_dtype=torch.bfloat16",
            source,
        )
        assert len(calls) == source.count("extern_kernels._scaled_mm(")
        for _, _, n, a_scale, b_scales in calls:
            assert b_scales == n
            assert re.search(rf"\b{a_scale} = (buf\d+; del|.*\(\d+, 1\), \(1, 1\))", source), a_scale


def test_both_copies_of_a_tensor_are_written_from_one_tile(training: Generated) -> None:
    """One along its x, the other along its y; none from a reduction, where a transposed store goes byte by byte. From
    the reduction that finds the scales of a weight's rows the row copy alone."""
    casts = [kernel for kernel in training.kernels if "tl.float8" in kernel.body]
    both = 0
    for kernel in casts:
        stores = [line for line in kernel.body.splitlines() if "tl.store(out_ptr" in line and "fp8" in str(kernel.meta)]
        if "r0_numel" in kernel.meta["signature"]:
            low = [name for name, kind in kernel.meta["signature"].items() if "fp8" in kind]
            assert len(low) == 1 and any(f"tl.store({low[0]} + (r0_1 +" in line for line in stores), kernel.name
        both += all(
            any(re.search(order, line) for line in stores) for order in (r"\((y0|ypair) \+", r"\((x1|xpair) \+")
        )
    # All but those whose column copy the backward makes: weights, SwiGLU's output, and with a known scale the norm's.
    known = any("quantize_rowcol_delayed" in kernel.name for kernel in casts)
    assert both >= len(casts) - (6 if known else 4)


def test_casts_saturate_by_comparison(training: Generated) -> None:
    """NaN-propagating min/max of floats beside transposed fp8 stores is Triton issue 11111: no kernel holds both. The
    amax of rows is a max of int32."""
    for kernel in training.kernels:
        if "tl.float8" in kernel.body:
            assert "minimum" not in kernel.body, kernel.name
            for accumulator in re.findall(r"triton_helpers\.(?:maximum|max2)\((\w+),", kernel.body):
                made = re.search(rf"^ *{accumulator} = (.*)$", kernel.body, re.MULTILINE)
                while made is not None and made[1].startswith("tl.broadcast_to("):
                    made = re.search(rf"^ *{made[1][16:].split(',')[0]} = (.*)$", kernel.body, re.MULTILINE)
                bits = made is not None and (" & " in made[1] or "int32" in made[1])
                assert bits, (kernel.name, made)


def test_every_kernel_compiles(training: Generated, arch: int, tmp_path: Path) -> None:
    for kernel in training.kernels:
        compiled = compile_to_cubin(kernel, arch, tmp_path)
        assert len(compiled.asm["cubin"]) > 0
        if "tl.float8" in kernel.body:
            assert "cvt.rn.satfinite.e" in compiled.asm["ptx"], (
                kernel.name
            )  # hardware conversion, not emulated bit work


@pytest.mark.parametrize(
    "case", ["linear_rowwise_padded", pytest.param("linear_rowwise_fp32", marks=pytest.mark.thorough)]
)
def test_rowwise_gemms_of_other_sizes_and_dtypes(case: str, arch: int, tmp_path: Path) -> None:
    """N = 88 is padded to 96, b's scales with it; an fp32 output is scaled outside the GEMM, which gets scalars."""
    generated = generate(case, arch)
    forward, backward = generated.sources
    [call] = [line for line in forward.splitlines() if "extern_kernels._scaled_mm(" in line]
    assert "(128, 96), (1, 128), 0)" in call
    if case == "linear_rowwise_padded":
        assert "(1, 96)" in call and "out_dtype=torch.bfloat16" in call
        assert backward.count("(1, 128)") >= 2
    else:
        scales = call.split("(1, 128), 0), ")[1].split(", ")[:2]
        assert all(f"{scale} = empty_strided_cuda((), (), torch.float32)" in forward for scale in scales)
        assert backward.count("out_dtype=torch.float32") == 2
    for kernel in generated.kernels:
        assert len(compile_to_cubin(kernel, arch, tmp_path).asm["cubin"]) > 0


@pytest.mark.thorough
def test_gelu_has_one_polynomial(tmp_path: Path) -> None:
    """Its backward casts it and its gradient both ways, with one erfc of ours for both and the tile of SwiGLU's."""
    kernels = [k for k in generate("gelu_training_delayed", 90).kernels if "gelu" in k.name and "tl.float8" in k.body]
    assert len(kernels) == 2
    for kernel in kernels:
        assert "libdevice.erf" not in kernel.body and kernel.body.count("rcp.approx") == 1
        assert compile_to_cubin(kernel, 90, tmp_path).asm["ptx"].count("rcp.approx") > 1
    assert kernels[1].tile == dict(zip(("XBLOCK", "YBLOCK", "num_warps"), PAIRED[3], strict=True))


@pytest.mark.thorough
def test_gradients_of_in_out_weights(arch):
    """Are what a GEMM writes, of the same operands as ever: nothing is cast or copied for it."""
    _, backward = generate("in_out", arch).sources
    [returned] = re.findall(r"^        return \((.*), \)$", backward, re.M)
    made = dict(re.findall(r"(buf\d+) = empty_strided_cuda\((\(\d+, \d+\), \(\d+, \d+\)), torch.bfloat16\)", backward))
    assert "reinterpret_tensor" not in returned
    assert {made[name] for name in returned.split(", ") if name in made} == {
        "(16384, 4096), (4096, 1)",
        "(4096, 14336), (14336, 1)",
        "(14336, 4096), (4096, 1)",
    }
