"""quantize, quantize_rowcol and dequantize, eager and compiled, against the oracle: bit for bit, scales included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_inductor import ops
from te_inductor.lowerings import install
from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values
from tests.oracle import casts
from tests.support.contents import (
    CONTENTS,
    DTYPES,
    FP32_SCOPES,
    LAYOUTS,
    QUANTIZERS,
    SIZES,
    check,
    check_both,
    rows_apart,
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_eager(content, quantizer):
    for size in SIZES:
        for dtype in DTYPES:
            for layout in LAYOUTS.values():
                x = layout(CONTENTS[content](*size).to(dtype))
                check_both(x, quantizer, ops.quantize, ops.quantize_rowcol)


finite = st.floats(width=32, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.one_of(st.integers(0, 40), st.integers(120, 270)),
    values=st.lists(st.floats(width=32), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    element=st.sampled_from(["e4m3", "e5m2"]),
    scope=st.sampled_from(FP32_SCOPES),
    epsilon=st.floats(0, 3e38),
    power=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
)
def test_eager_on_any_values(rows, columns, values, seed, element, scope, epsilon, power, dtype, transposed):
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(values), (rows, columns), generator=generator)
    noise = 1 + torch.randn(rows, columns, generator=generator) / 8
    x = (torch.tensor(values, dtype=torch.float32)[pick] * noise).to(dtype)
    quantizer = Quantizer(element, amax_epsilon=epsilon, power_2_scale=power, scope=scope)
    check_both(x.t() if transposed else x, quantizer, ops.quantize, ops.quantize_rowcol)


@settings(max_examples=300, deadline=None)
@given(amax=st.floats(0, width=32, allow_infinity=False), element=st.sampled_from(["e4m3", "e5m2"]))
def test_scale_of_any_amax(amax, element):
    """amax is the one value of the tensor, so the cast saturates at nothing and stays within a rounding of the
    maximum."""
    quantizer = Quantizer(element)
    data, scale_inv = ops.quantize(torch.tensor([[amax]]), quantizer)
    value = casts.encode_scale(amax, quantizer)
    assert scale_inv.item() == torch.tensor(1 / value, dtype=torch.float64).float().item()
    if amax > quantizer.format.max / casts.FP32_MAX:
        assert data[0, 0].item() == quantizer.format.max


@pytest.fixture(scope="module")
def compiled():
    """The two ops as one compiled function each, for all quantizers; sizes are static, as a te graph's are at first."""
    install()

    def quantize(x, quantizer):
        return torch.ops.te_inductor.quantize(x, quantizer)

    def quantize_rowcol(x, quantizer):
        return torch.ops.te_inductor.quantize_rowcol(x, quantizer)

    return quantize, quantize_rowcol


def compile_both(compiled, dynamic: bool = False):
    return [torch.compile(function, backend="inductor", fullgraph=True, dynamic=dynamic) for function in compiled]


def test_scales_of_a_power_of_two(compiled):
    """Generated code finds them without a division: every exponent, and mantissas on both sides of the largest
    values'."""
    exponents, mantissas = torch.arange(256), torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    bits = (exponents[:, None] << 23) + torch.cat([mantissas, 1 << torch.arange(23)])
    x = bits.int().view(torch.float32).view(-1, 1)
    quantizers = [Quantizer(element, power_2_scale=True, scope="row") for element in ("e4m3", "e5m2")]

    def cast(x):
        return [one for quantizer in quantizers for one in compiled[0](x, quantizer)]

    for found, expected in zip(torch.compile(cast, backend="inductor", fullgraph=True)(x), cast(x), strict=True):
        kind = torch.int32 if found.dtype == torch.float32 else torch.uint8  # of which bits are compared
        assert torch.equal(found.view(kind), expected.view(kind))


# Each is a C++ compile of seconds: all of them cover every size, dtype, layout and option once; contents share one.
COMPILED = [
    ((33, 70), torch.float16, "strided", Quantizer("e5m2", amax_epsilon=0.5)),
    ((33, 70), torch.bfloat16, "contiguous", Quantizer("e4m3", power_2_scale=True, scope="row")),
    ((130, 257), torch.float16, "transposed", Quantizer("e4m3", amax_epsilon=0.5, scope="1x128")),
    ((1, 1), torch.float32, "transposed", Quantizer("e4m3", scope="128x128")),
    ((130, 257), torch.bfloat16, "contiguous", Quantizer("e4m3", scope="128x128")),
]
THOROUGHLY = [  # besides
    ((1, 1), torch.float32, "contiguous", Quantizer("e4m3")),
    ((1, 1), torch.bfloat16, "contiguous", Quantizer("e4m3", scope="row")),
    ((1, 1), torch.bfloat16, "contiguous", Quantizer("e4m3", scope="1x128")),
    ((3, 17), torch.bfloat16, "transposed", Quantizer("e4m3", power_2_scale=True)),
    ((128, 64), torch.float32, "transposed", Quantizer("e4m3", amax_epsilon=0.5, power_2_scale=True)),
    ((33, 70), torch.bfloat16, "expanded", Quantizer("e5m2", power_2_scale=True)),
    ((3, 17), torch.float16, "transposed", Quantizer("e4m3", amax_epsilon=0.5, scope="row")),
    ((33, 70), torch.float32, "strided", Quantizer("e5m2", scope="row")),
    ((128, 64), torch.float32, "expanded", Quantizer("e4m3", power_2_scale=True, scope="row")),
    ((130, 257), torch.bfloat16, "strided", Quantizer("e5m2", scope="1x128")),
    ((256, 128), torch.float32, "contiguous", Quantizer("e4m3", power_2_scale=True, scope="1x128")),
    ((256, 128), torch.bfloat16, "expanded", Quantizer("e5m2", power_2_scale=True, scope="128x128")),
]


@pytest.mark.parametrize(
    ("size", "dtype", "layout", "quantizer"),
    [*COMPILED, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGHLY)],
    ids=str,
)
@pytest.mark.usefixtures("vectors")
def test_compiled(compiled, size, dtype, layout, quantizer):
    functions = compile_both(compiled)
    for make in CONTENTS.values():
        check_both(LAYOUTS[layout](make(*size).to(dtype)), quantizer, *functions)


@pytest.mark.quick("row")
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_compiled_with_symbolic_sizes(compiled, scope):
    functions = compile_both(compiled, dynamic=True)
    quantizer = Quantizer("e4m3", scope=scope)
    for size in [(33, 70), (34, 71), (128, 64), (7, 16), (300, 200)]:
        check_both(torch.randn(size), quantizer, *functions)


@pytest.mark.quick("tensor", "1x128")
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_compiled_behind_a_producer(scope):
    """The case that lowerings exist for: the producer is fused into the quantization."""
    install()
    quantizer = Quantizer("e4m3", scope=scope)

    def function(x, y):
        z = torch.relu(x + y) * 3
        return z, *torch.ops.te_inductor.quantize_rowcol(z, quantizer)

    x, y = torch.randn(33, 70), torch.randn(70)
    z, data, scale_inv, data_t, scale_inv_t = torch.compile(function, backend="inductor", fullgraph=True)(x, y)
    values, value, values_t, value_t = casts.quantize_rowcol(z, quantizer)
    check(z, quantizer, (data, scale_inv), (values, value))
    check(z.t(), quantizer, (data_t, scale_inv_t), (values_t, value_t))


def dequantized(data: Tensor, scale_inv: Tensor, scope: str, dtype: torch.dtype) -> Tensor:
    """The exact product, rounded to fp32 and then to the dtype."""
    return casts.dequantize(data.double(), scale_inv, scope).float().to(dtype).double()


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_dequantize(scope, how, dtype):
    install()
    quantizer = Quantizer("e4m3", scope=scope)

    def function(data, scale_inv):
        return torch.ops.te_inductor.dequantize(data, scale_inv, quantizer, dtype)

    if how == "compiled":
        function = torch.compile(function, backend="inductor", fullgraph=True)
    for make in (torch.randn, CONTENTS["nan"]):
        data, scale_inv = ops.quantize(make(133, 270), quantizer)
        back = function(data, scale_inv)
        assert back.dtype == dtype and back.is_contiguous()
        assert_same_values(back, dequantized(data, scale_inv, scope, dtype))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_error_is_at_most_half_a_step(scope, element):
    """The invariant of Quantizer: half a step of the element, relative for normal values, absolute for subnormal
    ones."""
    quantizer = Quantizer(element, scope=scope)
    x = torch.randn(160, 256) * torch.exp2(torch.randint(-20, 3, (160, 256)))
    data, scale_inv = ops.quantize(x, quantizer)
    scale_inv = casts.spread(scale_inv, scope, *x.shape)
    error = (data.double() * scale_inv.double() - x.double()).abs()
    half = torch.maximum(
        x.double().abs() * quantizer.format.epsilon / 2,
        quantizer.format.smallest_step / 2 * scale_inv.double(),
    )
    assert (error <= half * (1 + 2**-20)).all()  # the scale, its reciprocal and the product are fp32 roundings


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    """Zeros, infinity and NaN have scale 1, in their own row only; per tensor they would decide for all."""
    x = torch.randn(6, 32)
    clean, clean_scale = ops.quantize(x, Quantizer("e4m3", scope="row"))
    x[1], x[2, 3], x[4, 5] = 0.0, math.inf, math.nan
    data, scale_inv = ops.quantize(x, Quantizer("e4m3", scope="row"))
    assert scale_inv[[1, 2, 4]].flatten().tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(scale_inv[[0, 3, 5]], clean_scale[[0, 3, 5]])
    assert_same_values(data[[0, 3, 5]], clean[[0, 3, 5]].double())
    assert data[2, 3].isnan() and data[4, 5].isnan() and not data[1].float().any()


def test_each_copy_has_scales_of_its_own_rows():
    x = torch.tensor([[1.0, 2.0], [4.0, 64.0]])
    _, scale_inv, _, scale_inv_t = ops.quantize_rowcol(x, Quantizer("e4m3", power_2_scale=True, scope="row"))
    # 448 / 2 and 448 / 64 along the rows, 448 / 4 and 448 / 64 along the columns, each rounded down to a power of two
    assert (1 / scale_inv).tolist() == [[128.0], [4.0]]
    assert (1 / scale_inv_t).tolist() == [[64.0], [4.0]]


def test_the_transpose_of_square_blocks_holds_the_same_values():
    """A weight of both GEMMs; blocks of one row are of the copy that they lie in."""
    x = rows_apart(130, 257).bfloat16()
    data, scale_inv, data_t, scale_inv_t = ops.quantize_rowcol(x, Quantizer("e4m3", scope="128x128"))
    assert torch.equal(data_t[:, :130].view(torch.uint8), data[:, :257].t().contiguous().view(torch.uint8))
    assert torch.equal(scale_inv_t.view(3, 2), scale_inv.view(2, 3).t())
    _, scale_inv, _, scale_inv_t = ops.quantize_rowcol(x, Quantizer("e4m3", scope="1x128"))
    assert scale_inv.shape == (3 * 130,) and scale_inv_t.shape == (2 * 257,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_an_infinite_scale(scope, dtype, how):
    """448 over a subnormal of the tensor: the largest fp32 value, of blocks the largest of the tensor's dtype."""
    install()
    quantizer = Quantizer("e4m3", scope=scope)
    x = torch.full((2, 130), 1e-40).to(dtype)  # zero in fp16, whose own subnormals have a finite scale
    x[1] = 0
    function = lambda x: torch.ops.te_inductor.quantize(x, quantizer)  # noqa: E731
    if how == "compiled":
        function = torch.compile(function, backend="inductor", fullgraph=True)
    check(x, quantizer, function(x), casts.quantize(x, quantizer))
    if dtype != torch.float16:
        largest = torch.finfo(dtype if "x" in scope else torch.float32).max
        assert function(x)[1].flatten()[0].item() == torch.tensor(1 / largest, dtype=torch.float64).float().item()
