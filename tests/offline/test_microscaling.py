"""The code for MXFP8 and NVFP4 on Hopper, where they are emulated: casts that fuse with their producers, bf16
products."""

import re
from pathlib import Path

import pytest
import torch

from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values, scales_of, values_of
from tests.offline.harness import Generated, compile_to_cubin, generate
from tests.oracle import casts as reference
from tests.oracle import microscaling
from tests.support.contents import CONTENTS
from tests.support.interpreted import interpret


@pytest.mark.quick("mxfp8")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_every_gemm_is_a_product_of_bf16_into_fp32(recipe: str) -> None:
    forward, backward = generate(f"mlp_training_{recipe}", 90).sources
    for source, count in ((forward, 3), (backward, 6)):
        calls = [line for line in source.splitlines() if "extern_kernels.mm" in line]
        assert len(calls) == count and "extern_kernels._scaled_mm" not in source
        assert all("mm_dtype(" in call or "out_dtype=torch.float32" in call for call in calls), calls


def test_an_mxfp8_copy_is_one_kernel() -> None:
    """Amax, scale and cast together, from one read, as scales of 1 x 128 have it."""
    generated = generate("mlp_training_mxfp8", 90)
    casts = [kernel for kernel in generated.kernels if "tl.float8" in kernel.body]
    assert len(casts) >= 10
    for kernel in casts:
        assert "triton_helpers.max2(" in kernel.body and "for r0_offset" not in kernel.body, kernel.name
        assert kernel.body.count("tl.load(in_ptr0") == 1, kernel.name
        assert "triton_helpers.maximum" not in kernel.body and "minimum" not in kernel.body, kernel.name


@pytest.mark.thorough
def test_an_nvfp4_copy_is_one_kernel_behind_the_amax_of_the_tensor() -> None:
    """The amax of blocks of 16 runs over 8 pairs, as the bytes do."""
    generated = generate("mlp_training_nvfp4", 90)
    casts = [k for k in generated.kernels if "_quantize_" in k.name and "_scaled_mm" not in k.name and "per" in k.name]
    for kernel in casts:
        if "rowcol" not in kernel.name:  # 16 x 16 of weights have their amaxes first
            assert "R0_BLOCK: tl.constexpr = 8" in kernel.body and ".to(tl.uint8)" in kernel.body, kernel.name
    assert any("randint" in kernel.name for kernel in casts)


@pytest.mark.thorough
def test_scales_of_nvfp4_are_no_words_of_casts() -> None:
    """Note [Casts in PTX] is of tiles; a scale may be alone in its program."""
    kernels = [k for k in generate("small_training_nvfp4_plain", 90).kernels if "tl.float8e4nv" in k.body]
    reductions = [kernel for kernel in kernels if "r0_numel" in kernel.meta["signature"]]
    assert any("ynumel" in kernel.meta["signature"] for kernel in reductions)
    assert not any("satfinite" in kernel.body for kernel in reductions)


@pytest.mark.thorough
def test_what_is_saved_is_low_precision() -> None:
    """What is saved for wgrad and dgrad: bytes of two values each, 16 values a block, and their scales."""
    forward, _ = generate("mlp_training_nvfp4", 90).sources
    assert re.search(
        r"empty_strided_cuda\(\(4096, 1024, 8\), \(8192, 8, 1\), torch.uint8\)", forward
    )  # the norm's output
    assert re.search(r"empty_strided_cuda\(\(4096, 1024\), \(1024, 1\), torch.float8_e4m3fn\)", forward)


MXFP8 = {
    "two_way_cast_mxfp8": ((64, 96), "1x32"),
    "two_way_cast_mxfp8_padded": ((20, 70), "1x32"),
    "two_way_cast_mxfp8_squares": ((40, 70), "32x32"),
}
MXFP6 = {"two_way_cast_mxfp6": ((20, 70), "e3m2", "1x32"), "two_way_cast_mxfp6_squares": ((40, 70), "e2m3", "32x32")}
NVFP4 = {"nvfp4_gradient": ((20, 70), "1x16"), "nvfp4_input": ((32, 64), "1x16"), "nvfp4_weight": ((20, 70), "16x16")}


@pytest.mark.quick("two_way_cast_mxfp8_padded-sm_90", "nvfp4_gradient-sm_100", "two_way_cast_mxfp6-sm_90")
@pytest.mark.parametrize("arch", [90, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("case", ["two_way_cast_mxfp8_padded", "nvfp4_gradient", "two_way_cast_mxfp6"])
def test_casts_compile(case: str, arch: int, tmp_path: Path) -> None:
    for kernel in generate(case, arch).kernels:
        assert len(compile_to_cubin(kernel, arch, tmp_path).asm["cubin"]) > 0


def check(x, quantizer, found, amax=None, seed=None) -> None:
    data, scale_inv = found
    values, scales = reference.quantize(x, quantizer, amax, seed)
    assert_same_values(scales_of(scale_inv), scales)
    assert_same_values(values_of(data, quantizer.element), values)


def only(generated: Generated) -> str:
    [source] = generated.sources
    return source


@pytest.mark.quick("two_way_cast_mxfp8_padded", "two_way_cast_mxfp8_squares")
@pytest.mark.parametrize("case", MXFP8)
def test_mxfp8_in_the_interpreter(case: str, tmp_path: Path) -> None:
    size, scope = MXFP8[case]
    x = CONTENTS["rows apart"](*size).to(torch.bfloat16)
    [(data, scale_inv, data_t, scale_inv_t)] = interpret(only(generate(case, 90)), [[x]], tmp_path)
    check(x, Quantizer("e4m3", scope=scope), (data, scale_inv))
    check(x.t(), Quantizer("e4m3", scope=scope), (data_t, scale_inv_t))


@pytest.mark.quick("two_way_cast_mxfp6")
@pytest.mark.parametrize("case", MXFP6)
def test_mxfp6_in_the_interpreter(case: str, tmp_path: Path) -> None:
    size, element, scope = MXFP6[case]
    x, quantizer = CONTENTS["rows apart"](*size).to(torch.bfloat16), Quantizer(element, scope=scope)
    [(data, scale_inv, data_t, scale_inv_t)] = interpret(only(generate(case, 90)), [[x]], tmp_path)
    check(x, quantizer, (data, scale_inv))
    check(x.t(), quantizer, (data_t, scale_inv_t))


@pytest.mark.thorough
@pytest.mark.parametrize("arch", [90, 100], ids=lambda arch: f"sm_{arch}")
def test_mxfp6_is_multiplied_in_bf16(arch: int, tmp_path: Path) -> None:
    """Nowhere as bytes that a library would take for values."""
    sources = generate("linear_mxfp6", arch).sources
    assert sum(source.count("extern_kernels.mm") for source in sources) == 3
    assert not any("extern_kernels._scaled_mm" in source or "torch.float8" in source for source in sources)
    for kernel in generate("linear_mxfp6", arch).kernels:
        assert compile_to_cubin(kernel, arch, tmp_path).asm["cubin"]


@pytest.mark.quick("nvfp4_weight")
@pytest.mark.parametrize("case", NVFP4)
def test_nvfp4_in_the_interpreter(case: str, tmp_path: Path) -> None:
    size, scope = NVFP4[case]
    stochastic = case == "nvfp4_gradient"
    x = CONTENTS["rows apart"](*size).nan_to_num(1.0, 2.0, -2.0).to(torch.bfloat16)
    amax, seed = reference.tensor_amax(x), 1234567 if stochastic else None
    scalars = [torch.tensor(amax), *([torch.tensor(seed)] if stochastic else [])]
    source = only(generate(case, 90))
    x_is_first = (
        f"assert_size_stride(arg0_1, ({size[0]}, {size[1]})" in source
    )  # Dynamo orders inputs by their first use
    [results] = interpret(source, [[x, *scalars] if x_is_first else [*scalars, x]], tmp_path)
    quantizer = Quantizer("e2m1", scope=scope, stochastic=stochastic)
    check(x, quantizer, results[:2], amax, seed)
    check(x.t(), quantizer, results[2:4], amax, seed)
    if stochastic:
        assert_same_values(results[4], microscaling.hadamard(x.t()))
        assert results[5].item() == amax
