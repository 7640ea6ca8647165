"""MXFP8 and NVFP4 for compute capability 10.0: the generated graphs end to end, by cuBLASLt, and by CUTLASS as if
max-autotune had found it faster; experts by torch's library. They have never run on the hardware."""

import re

import pytest
import torch

from te_inductor import recipes
from tests.bounds import assert_within
from tests.offline.harness import compile_to_cubin, generate
from tests.oracle import casts, grouped
from tests.support import grouped_layers as layers
from tests.support.interpreted import interpret

LIBRARY = "torch.ops.te_inductor.scaled_grouped_mm.default("
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
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_experts_are_the_librarys(recipe, tmp_path):
    """Two fprops, two dgrads, two wgrads by torch's grouped product; their scales are put in its order by kernels that
    compile, and the host reads nothing."""
    generated = generate(f"experts_{recipe}", 100)
    forward, backward = generated.sources
    assert forward.count(LIBRARY) == 2 and backward.count(LIBRARY) == 4
    code = forward + backward
    assert "dequantize" not in code and not re.search(r"\.item\(|\.tolist\(|\.cpu\(", code)
    orders = [kernel for kernel in generated.kernels if "clone" in kernel.name and "permute" in kernel.name]
    assert orders and all(compile_to_cubin(kernel, 100, tmp_path).asm["cubin"] for kernel in orders)


SIZES = (0, 129, 7)  # an expert without rows, one with more than a tile


def one_layer():
    """x, with rows behind the last group, the weight, dy, ends."""
    x, [w], _, dy, _ = layers.inputs(SIZES, 14, (160,), 96, torch.bfloat16, bias=False)
    return x, w, dy, layers.ends_of(SIZES)


@pytest.mark.thorough
def test_experts_are_given_what_the_oracle_multiplies(tmp_path):
    """The interpreter shows it: casts of each expert's weight, scales in their order, the factor."""
    [source] = generate("grouped_blackwell_inference", 100).sources
    assert source.count(LIBRARY) == 1 and "= torch.ops.te_inductor.quantize_experts." not in source
    x, w, dy, ends = one_layer()
    shapes = {(3, 160, 96): w.detach(), (150, 96): x.detach(), (3,): ends}
    found = re.findall(r"assert_size_stride\(arg(\d)_1, \(([\d, ]+)\)", source)
    inputs = [shapes[tuple(int(size) for size in sizes.split(",") if size.strip())] for _, sizes in sorted(found)]
    [(y,)] = interpret(source, [inputs], tmp_path)
    slots = recipes.NVFP4BlockScaling().slots()
    pairs = grouped.operands(x.detach(), [w.detach()], dy, SIZES, slots).fprop
    for (begin, end), (a, b) in zip(grouped.spans(SIZES), pairs, strict=True):
        if begin < end:
            expected, error = casts.product(a, b, None, slots.fprop), layers.error_of(a, b, None, y.dtype, slots.fprop)
            layers.assert_near(y[begin:end], expected, error, "y")
    assert not y[sum(SIZES) :].any()


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_the_three_products_of_experts(recipe, tmp_path):
    forward, backward = generate(f"grouped_blackwell_{recipe}", 100).sources
    assert forward.count(LIBRARY) == 1 and backward.count(LIBRARY) == 2
    (x, w, dy, ends), nearest = one_layer(), {} if recipe == "mxfp8" else {"disable_stochastic_rounding": True}
    [(y, *saved)] = interpret(forward, [[w.detach(), x.detach(), ends]], tmp_path)
    [(w.grad, x.grad, _)] = interpret(backward, [[*saved, dy]], tmp_path)
    layers.check(x, [w], [], SIZES, type(recipes.resolve(recipe))(**nearest).slots(), [y], dy)


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
