"""MXFP8 and NVFP4 for compute capability 10.0: the generated graphs end to end, by cuBLASLt, and by CUTLASS as if
max-autotune had found it faster. They have never run on the hardware."""

import re

import pytest
import torch

from te_inductor import recipes
from tests.bounds import assert_within
from tests.offline.harness import compile_to_cubin, generate
from tests.offline.test_interpreter import interpret
from tests.oracle import casts

VIEWS = {"mxfp8": "torch.float8_e8m0fnu", "nvfp4": "torch.float4_e2m1fn_x2"}


@pytest.mark.quick("mxfp8")
@pytest.mark.parametrize("recipe", VIEWS)
def test_every_gemm_of_training_is_the_tensor_cores(recipe, tmp_path):
    """gate, up and down: three fprops, three dgrads, three wgrads, and nothing is dequantized."""
    generated = generate(f"mlp_training_{recipe}", 100)
    gemms = [
        line
        for source in generated.sources
        for line in source.splitlines()
        if "extern_kernels." in line and "out=" in line
    ]
    assert len(gemms) == 9 and all("extern_kernels._scaled_mm(" in line for line in gemms)
    assert all(line.count(VIEWS[recipe]) == 2 and "use_fast_accum=False" in line for line in gemms)
    [swizzle, *_] = [kernel for kernel in generated.kernels if "scaled_mm" in kernel.name and "fp8" not in kernel.name]
    assert compile_to_cubin(swizzle, 100, tmp_path).asm["cubin"]


@pytest.mark.thorough
def test_experts_are_the_librarys(tmp_path):
    """Two fprops, two dgrads, two wgrads by torch's grouped product; their scales are put in its order by kernels that
    compile, and the host reads nothing."""
    generated = generate("experts_mxfp8", 100)
    forward, backward = generated.sources
    product = "torch.ops.te_inductor.scaled_grouped_mm.default("
    assert forward.count(product) == 2 and backward.count(product) == 4
    code = forward + backward
    assert "dequantize" not in code and not re.search(r"\.item\(|\.tolist\(|\.cpu\(", code)
    orders = [kernel for kernel in generated.kernels if "clone" in kernel.name and "permute" in kernel.name]
    assert orders and all(compile_to_cubin(kernel, 100, tmp_path).asm["cubin"] for kernel in orders)


@pytest.mark.quick("linear_blackwell-nvfp4")
@pytest.mark.parametrize(
    ("library", "recipe"),
    [("linear_blackwell", "mxfp8"), ("linear_blackwell", "nvfp4"), ("cutlass_blackwell", "nvfp4")],
)
def test_the_tensor_cores_are_given_what_the_oracle_multiplies(library, recipe, tmp_path):
    """Data, scales, their layout, padding and the tensors' factors, through the interpreter, against float64."""
    [source] = generate(f"{library}_{recipe}", 100).sources
    cutlass = library == "cutlass_blackwell"
    assert ("extern_kernels.te_inductor_cutlass_microscaled_mm(" in source) == cutlass
    assert ("extern_kernels._scaled_mm(" in source) != cutlass
    columns = 144 if cutlass else 88
    operands = {
        (130, 160): torch.randn(130, 160) * torch.logspace(-6, 6, 130)[:, None],
        (columns, 160): torch.randn(columns, 160) * torch.logspace(3, -3, 160),
        (columns,): torch.randn(columns),
    }
    operands = {shape: x.bfloat16() for shape, x in operands.items()}
    shapes = dict(re.findall(r"assert_size_stride\(arg(\d)_1, \(([\d, ]+)\)", source))
    sizes = [[int(size) for size in shapes[place].split(",") if size.strip()] for place in sorted(shapes)]
    inputs = [operands[tuple(size)] for size in sizes]
    [(y,)] = interpret(source, [inputs], tmp_path)
    x, weight, bias = operands.values()
    named = recipes.resolve(recipe)
    expected = casts.linear_forward(x, weight, bias, named)
    # cuBLASLt's product is rounded, times the factor of two-level scales again, plus the bias again; CUTLASS's at the
    # end.
    without = casts.linear_forward(x, weight, None, named).abs()
    roundings = 2.0**-8 * expected.abs() if cutlass else 3 * 2.0**-9 * (without + expected.abs())
    error = roundings + 2.0**-20 * without.amax(1, keepdim=True)
    assert_within(y, expected, error, recipe)
    wrong = expected * (1 + 2.0**-4)
    assert not ((y.double() - wrong).abs() <= error).all()
