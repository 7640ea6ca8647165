"""The op set on the GPU, eager and compiled, against the oracle: casts bit for bit, GEMMs within derived bounds."""

from dataclasses import replace

import pytest
import torch

from te_inductor import ops, targets
from te_inductor.lowerings import install
from te_inductor.recipes import Gemm, Quantizer
from tests.bounds import assert_same_values, assert_within, gemm_error, magnitudes_of
from tests.oracle import casts
from tests.support.contents import CONTENTS, FP32_SCOPES, QUANTIZERS, check_both
from tests.support.gpu_ops import FAST_BITS, SIZES

pytestmark = pytest.mark.usefixtures("compile_every_size")

PAIRS = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]


def compiled(name: str):
    install()
    op = getattr(ops, name)
    return torch.compile(lambda x, q: op(x, q), backend="te", dynamic=False)


def on_gpu(function):
    """Runs on poisoned memory: what the kernel does not write stays NaN."""

    def run(x, quantizer):
        poison = torch.full((4 * x.numel() + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
        del poison
        return tuple(result.cpu() for result in function(x.cuda(), quantizer))

    return run


@pytest.mark.parametrize("quantizer", QUANTIZERS[::3], ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_compiled_casts(content, quantizer):
    for size in SIZES:
        x = CONTENTS[content](*size).to(torch.bfloat16)
        check_both(x, quantizer, on_gpu(compiled("quantize")), on_gpu(compiled("quantize_rowcol")))


@pytest.mark.parametrize("size", [(1, 9728), (64, 14336), (263, 16384), (264, 9728), (5, 16400)], ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_long_rows(content, size):
    """Each in one program where they are few and it can hold them."""
    x, quantizer = CONTENTS[content](*size).to(torch.bfloat16), Quantizer("e4m3", power_2_scale=True, scope="row")
    data, scale_inv = on_gpu(compiled("quantize"))(x, quantizer)
    values, value = casts.quantize(x, quantizer)
    assert torch.equal(scale_inv.double(), value)
    assert_same_values(data, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_compiled_casts_of_other_dtypes(scope, dtype):
    for size in SIZES:
        x = torch.randn(size).to(dtype)
        check_both(x, Quantizer("e4m3", scope=scope), on_gpu(compiled("quantize")), on_gpu(compiled("quantize_rowcol")))


@pytest.mark.parametrize("size", [(256, 384), (96, 272)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scope", ["row", "1x128", "128x128"])
def test_pieces_side_by_side(scope, dim, size):
    """Pieces are as one matrix: each piece is written into its place; where blocks are not whole, all are brought
    together."""
    install()
    run = torch.compile(ops.quantize_pieces, backend="te", dynamic=False)
    for first in CONTENTS.values():
        pieces = [make(*size).to(torch.bfloat16) for make in (first, torch.randn, CONTENTS["rows apart"])]
        whole = torch.cat(pieces, dim)

        made = on_gpu(lambda x, quantizer, pieces=pieces: run([piece.cuda() for piece in pieces], dim, quantizer))
        check_both(whole, Quantizer("e4m3", scope=scope), lambda x, q, both=made: both(x, q)[:2], made)


@pytest.mark.parametrize("columns", [1024, 1280, 4096, 8192])
@pytest.mark.parametrize("content", CONTENTS)
def test_copies_of_blocks_each_alone(content, columns):
    """The row copy by a reduction that holds rows, as a norm's, but with a statistic that is exact; the column copy in
    tiles of its own."""
    install()

    def row(x, quantizer):
        wide = x.float()
        return ops.quantize_rowcol(wide - wide.amax(1, keepdim=True), quantizer)[:2]

    def column(x, quantizer):
        return ops.quantize_rowcol(x.abs() + 0.0, quantizer)[2:]

    by_rows, by_columns = (torch.compile(function, backend="te", dynamic=False) for function in (row, column))
    x = CONTENTS[content](384, columns).to(torch.bfloat16)
    wide = x.float()
    centred = wide - wide.amax(1, keepdim=True)
    for power_2_scale in (False, True):
        quantizer = Quantizer("e4m3", power_2_scale=power_2_scale, scope="1x128")
        for function, of in ((by_rows, centred), (by_columns, x.abs().t())):
            data, scale_inv = on_gpu(function)(x, quantizer)
            values, value = casts.quantize(of, quantizer)
            assert torch.equal(scale_inv.double(), value)
            assert_same_values(data, values)


@pytest.mark.parametrize("content", CONTENTS)
def test_pairs_of_rows(content):
    """Three tensors are read, so that columns are stored in pairs of rows (lowerings/codegen/column_pairs.py)."""
    install()
    quantizer, scale = Quantizer("e4m3"), torch.tensor(448 / 3)
    run = torch.compile(
        lambda x, y, z, scale: ops.quantize_rowcol_delayed(torch.where(y > z, x, x.abs()), scale, quantizer),
        backend="te",
        dynamic=False,
    )
    for size in (*SIZES, (80, 144), (512, 1024)):
        x, y, z = CONTENTS[content](*size).bfloat16(), *(torch.randn(size).bfloat16() for _ in range(2))
        poison = torch.full((4 * x.numel() + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
        del poison
        data, data_t = (copy.cpu() for copy in run(x.cuda(), y.cuda(), z.cuda(), scale.cuda()))
        chosen = torch.where(y > z, x, x.abs())
        for found, given in ((data, chosen), (data_t, chosen.t())):
            assert_same_values(found, casts.quantize_known(given, scale.item(), quantizer)[0])


def of_every_bf16(function):
    """Every bf16 value, NaN and infinity too, as fp32, and what a kernel that casts makes of it, as fp64."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.bfloat16).view(256, 256).float()
    install()
    quantizer = Quantizer("e4m3", scope="1x128")
    run = torch.compile(lambda x: (function(x), *ops.quantize_rowcol(function(x), quantizer)), backend="te")
    return x, run(x)[0].double()


def test_the_sigmoid_of_kernels_that_quantize():
    """A rounding of x * log2(e) is one of the exponent, by which e is multiplied."""
    x, found = of_every_bf16(torch.sigmoid)
    exact = torch.sigmoid(x.double())
    bound = exact * (2 * x.double().abs() + 8) * 2.0**-23 + 2.0**-126
    assert torch.equal(found.isnan(), x.isnan())
    usual = x.isfinite()
    assert bool(((found - exact).abs() <= bound)[usual].all())
    assert torch.equal(found[x.isinf()], exact[x.isinf()])


def test_the_erfc_of_kernels_that_quantize():
    """The bound is that of tests/backend/test_gelu.py, and two units of each approximation."""
    x, found = of_every_bf16(torch.erfc)
    exact, z = torch.erfc(x.double()), x.double().clamp(0)
    usual = x.isfinite()
    bound = exact * (1.2e-7 + (10 + 2 * (z * z + 2)) * 2.0**-24) + 2.0**-126
    assert bool(((found - exact).abs() <= bound)[usual].all())
    assert torch.equal(found.isnan(), x.isnan()) and torch.equal(found[x.isinf()], exact[x.isinf()])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_eager_casts(scope, content):
    for size in SIZES:
        x = CONTENTS[content](*size).to(torch.bfloat16)
        check_both(x, Quantizer("e5m2", scope=scope), on_gpu(ops.quantize), on_gpu(ops.quantize_rowcol))


@pytest.mark.parametrize("scope", FP32_SCOPES)
def test_transposed_casts_beside_nan_and_infinity_at_full_size(scope):
    """Triton issue 11111: transposed fp8 stores beside NaN-propagating min/max. Full tiles, many blocks."""
    x = torch.randn(4096, 1040).to(torch.bfloat16)
    x[torch.rand_like(x, dtype=torch.float32) < 0.01] = float("nan")
    x[torch.rand_like(x, dtype=torch.float32) < 0.01] = float("inf")
    check_both(x, Quantizer("e4m3", scope=scope), on_gpu(compiled("quantize")), on_gpu(compiled("quantize_rowcol")))


@pytest.mark.parametrize("run", ["eager", "compiled"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scopes", PAIRS, ids=" by ".join)
def test_scaled_mm(scopes, run, fast, out_dtype):
    install()
    op = ops.scaled_mm
    gemm = Gemm("fprop", fast_accum=fast, scopes=scopes)
    if gemm.blocked and fast:
        pytest.skip("scales of blocks need split accumulation")
    if run == "compiled":
        function = torch.compile(lambda *arguments: op(*arguments, gemm, out_dtype), backend="te", dynamic=False)
    else:
        function = lambda *arguments: op(*arguments, gemm, out_dtype)  # noqa: E731
    sizes = [(1, 16, 16), (17, 48, 64), (129, 50, 32), (256, 512, 4096), (64, 7, 16)]
    if gemm.blocked:  # K/128 of 1, 2, 4, 6 and 32; M and N that are no multiples of 4 or 16, one block and several
        sizes += [(130, 504, 768), (5, 300, 256), (384, 384, 512)]
    for m, n, k in sizes:
        for bias in (None, torch.randn(n), torch.randn(n).bfloat16()):
            q = [Quantizer("e4m3", scope=scope) for scope in scopes]
            a, a_scale = casts.quantize(torch.randn(m, k), q[0])
            b, b_scale = casts.quantize(torch.randn(n, k), q[1])
            scales = [scale.float().cuda() for scale in (a_scale, b_scale)]
            dtype = q[0].format.dtype
            operands = (
                a.to(dtype).cuda(),
                scales[0],
                b.to(dtype).cuda(),
                scales[1],
                None if bias is None else bias.cuda(),
            )
            y = function(*operands).cpu()
            expected = casts.scaled_mm(a, a_scale, b, b_scale, bias, gemm)
            error = gemm_error(a, a_scale, b, b_scale, bias, out_dtype, gemm)
            # Each tensor-core step adds 32 products with its addends aligned to FAST_BITS bits of the largest, fast or
            # not (fast accumulation also keeps the running sum so); the steps' errors add up at worst.
            _, magnitudes = magnitudes_of(a, a_scale, b, b_scale, gemm)
            steps = (k / 32 if fast else 4) if k > 32 else 1
            error = error + steps * 2.0**-FAST_BITS * magnitudes
            assert_within(y, expected, error, f"{m} x {n} x {k}, bias {None if bias is None else bias.dtype}")


def test_scales_of_blocks_go_to_cublaslt_as_they_are():
    """No copy of scales where sizes are whole."""
    if targets.Ability.BLOCK_SCALES not in targets.of(torch.device("cuda")).can:
        pytest.skip("no GEMM with scales of blocks here")
    q = [Quantizer("e4m3", scope=scope) for scope in ("1x128", "128x128")]
    a, a_scale = ops.quantize(torch.randn(256, 1024, device="cuda"), q[0])
    b, b_scale = ops.quantize(torch.randn(512, 1024, device="cuda"), q[1])
    gemm = Gemm("fprop", scopes=("1x128", "128x128"))
    ops.scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.bfloat16)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.bfloat16)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.self_device_time_total > 0]
    assert kernels and not any(word in name.lower() for name in kernels for word in ("elementwise", "copy")), kernels


def test_scales_of_blocks_without_the_library(monkeypatch):
    """Another device: fp32 products of what the blocks hold, never an error."""
    target = targets.of(torch.device("cuda"))
    target = replace(target, can=target.can & ~targets.Ability.BLOCK_SCALES)
    monkeypatch.setattr(targets, "of", lambda device: target)
    torch._dynamo.reset()
    q = [Quantizer("e4m3", scope=scope) for scope in ("1x128", "128x128")]
    a, a_scale = ops.quantize(torch.randn(33, 200, device="cuda"), q[0])
    b, b_scale = ops.quantize(torch.randn(50, 200, device="cuda"), q[1])
    gemm = Gemm("fprop", scopes=("1x128", "128x128"))
    operands = [tensor.cpu().double() for tensor in (a, a_scale, b, b_scale)]
    y = ops.scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.float32).cpu()
    expected = casts.scaled_mm(*operands, None, gemm)
    assert_within(y, expected, gemm_error(*operands, None, torch.float32, gemm), "y")
