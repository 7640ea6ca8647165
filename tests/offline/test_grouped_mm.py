"""Grouped FP8 GEMMs without a GPU: the kernel run as the Python it is written in (`tests.offline.gluon`), and cubins."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from te_inductor.recipes import Gemm
from te_inductor.targets import sm90
from tests import bounds, grouped

triton = pytest.importorskip("triton")

from te_inductor.kernels.grouped_mm import GroupedConfig, cut, takes  # noqa: E402
from te_inductor.templates.triton import grouped_kernel, grouped_mm  # noqa: E402
from te_inductor.templates.triton.grouped_mm import GroupedLaunch  # noqa: E402
from te_inductor.templates.triton.launcher import Box  # noqa: E402
from tests.offline.gluon import Descriptor, Number, Pointer, Program, numpy_of  # noqa: E402
from tests.support.cuda_code import compiled, disassembled  # noqa: E402

TENSOR, ROW, BLOCKS = ("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")
MIXED = ("row", "tensor")
SIZES = {
    "uneven": ((0, 1, 15, 16, 0, 17, 127, 128, 129), 0),
    "tail": ((130, 0, 3), 140),
    "all": ((0, 0, 300, 0), 0),
    "none": ((0, 0), 5),
    "one": ((1,), 0),
}
NARROW, WIDE = GroupedConfig(128, 2), GroupedConfig(256, 3)  # fewer stages than there are turns, and more


def described(x: Tensor, box: Box) -> Descriptor:
    assert x.is_contiguous()
    return Descriptor(x.view(-1, x.shape[-1]), tuple(box.shape))  # as `Described` does


def run(call: GroupedLaunch) -> None:
    """Every program; tensors become pointers to what they hold."""

    def given(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(numpy_of(value).reshape(-1))
        return Number(value) if type(value) is int else value

    named = dict(zip(grouped_kernel.grouped.arg_names, call.arguments, strict=False)) | call.launcher.constants
    arguments = {name: given(value) for name, value in named.items()}
    for program in range(call.programs):
        Program(program, {}).run(grouped_kernel.grouped, **arguments)


def multiplied(problem: grouped.Products, gemm: Gemm, config: GroupedConfig, programs: int = 3) -> Tensor:
    out = torch.full((problem.a.shape[0], problem.b.shape[1]), torch.nan)
    given = problem.a, problem.a_scale, problem.b, problem.b_scale, problem.ends, problem.bias
    run(grouped_mm.prepared(*given, out, gemm, config, described, programs))
    return out


def assert_right(y: Tensor, expected: tuple[Tensor, Tensor], what: str) -> None:
    assert not y.isnan().any(), what
    bounds.assert_within(y, *expected, what)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scopes", [TENSOR, ROW, MIXED, BLOCKS], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_groups(sizes, scopes, fast):
    """Groups that are empty, of a row, of about a tile; all rows in one; rows behind them that are NaN."""
    gemm = Gemm("fprop", fast, scopes)
    problem = grouped.products(*SIZES[sizes], 144, 272, gemm, None)
    y = multiplied(problem, gemm, WIDE)
    assert_right(y, problem.expected(gemm, torch.float32), sizes)
    assert (y[int(problem.ends[-1]) :] == 0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", [NARROW, WIDE], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (128, 128), (272, 144), (400, 528)], ids=str)
@pytest.mark.parametrize("scopes", [ROW, BLOCKS], ids=str)
def test_sizes_of_experts(scopes, n, k, config):
    """N and K that no tile divides; a gradient's element, and a bias."""
    gemm = Gemm("dgrad", False, scopes, ("e5m2", "e4m3"))
    problem = grouped.products((70, 0, 200), 3, n, k, gemm, torch.float32)
    assert_right(multiplied(problem, gemm, config), problem.expected(gemm, torch.float32), "bias")


def test_bands():
    """More tiles below each other than a band has, and a grid of one program."""
    gemm = Gemm("fprop", True, ROW)
    problem = grouped.products((2100, 2200), 0, 272, 16, gemm, None)
    for programs in (1, 7):
        assert_right(multiplied(problem, gemm, NARROW, programs), problem.expected(gemm, torch.float32), "bands")


@pytest.mark.parametrize("scopes", [TENSOR, ROW, BLOCKS], ids=str)
def test_nan_stays_in_its_group(scopes):
    gemm = Gemm("fprop", False, scopes)
    problem = grouped.products((40, 50, 60), 0, 144, 144, gemm, None)
    expected = problem.expected(gemm, torch.float32)
    problem.a[40:90], problem.b[1] = torch.nan, torch.nan
    y = multiplied(problem, gemm, WIDE)
    assert y[40:90].isnan().all()
    for part in (slice(0, 40), slice(90, 150)):
        assert_right(y[part], tuple(one[part] for one in expected), "others")


@pytest.mark.sample(1)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scopes", [TENSOR, ROW, MIXED, ("1x128", "1x128")], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_wgrad(scopes, fast, added):
    """Empty groups, whose scales are NaN, and NaN behind the last."""
    gemm = Gemm("wgrad", fast, scopes, ("e5m2", "e4m3"))
    for sizes, n, k, config in (
        ((200, 0, 1, 128, 0), 144, 272, WIDE),
        ((0, 0), 16, 16, NARROW),
        ((500,), 272, 144, NARROW),
    ):
        problem = grouped.gradients(sizes, 128, n, k, gemm)
        result, error = problem.expected(gemm, torch.float32)
        total = torch.randn(result.shape) * result.abs().mean().float()
        out = total.clone() if added else torch.full(result.shape, torch.nan)
        given = problem.a, problem.a_scale, problem.b, problem.b_scale, problem.starts
        run(grouped_mm.prepared_wgrad(*given, out, gemm, added, config, described, 3))
        if added:
            result = result + total.double()
            error = error + bounds.UNIT[torch.float32] * (result.abs() + error)
        assert_right(out, (result, error), str(sizes))


def test_bounds_find_a_wrong_scale():
    """A scale that is off by a step of fp32's mantissa times 16, and one of the next group."""
    gemm = Gemm("fprop", False, BLOCKS)
    problem = grouped.products((40, 30), 0, 144, 144, gemm, None)
    for wrong in (problem.b_scale * (1 + 2.0**-4), problem.b_scale.roll(1, 0)):
        y = multiplied(dataclasses.replace(problem, b_scale=wrong), gemm, NARROW)
        with pytest.raises(AssertionError, match="derived bound"):
            bounds.assert_within(y, *problem.expected(gemm, torch.float32), "wrong")


def test_config():
    """What is chosen fits into shared memory; tiles are narrow where wide ones leave multiprocessors idle."""
    for m, n in ((32768, 28672), (131072, 1536), (64, 2880), (5, 16)):
        config = cut(m, n, sm90.LIMITS.multiprocessors)
        assert config.shared_memory <= sm90.LIMITS.shared_memory
        assert config.block_n == (256 if m > 1024 else 128)


def test_supports():
    for name, scopes, supported in (
        ("fprop", TENSOR, True), ("dgrad", MIXED, True), ("fprop", BLOCKS, True), ("wgrad", BLOCKS, False),
        ("wgrad", ("1x128", "1x128"), True), ("fprop", ("1x128", "1x128"), False),
        ("wgrad", ("128x128", "1x128"), False), ("fprop", ("1x32", "1x32"), False),
    ):  # fmt: skip
        assert takes(Gemm(name, scopes=scopes)) is supported, (name, scopes)


CUBINS = [  # the first four are those of make test
    (Gemm("fprop", True, ROW), "bf16", False),
    (Gemm("fprop", False, BLOCKS), "bf16", False),
    (Gemm("dgrad", False, TENSOR, ("e5m2", "e4m3")), "fp16", False),
    (Gemm("wgrad", False, ("1x128", "1x128")), "fp32", True),
    (Gemm("fprop", True, TENSOR), "bf16", False),
    (Gemm("dgrad", False, ROW, ("e5m2", "e4m3")), "bf16", False),
    (Gemm("wgrad", False, ROW, ("e5m2", "e4m3")), "bf16", False),
    (Gemm("wgrad", False, TENSOR, ("e5m2", "e4m3")), "fp32", True),
    (Gemm("wgrad", False, ("1x128", "1x128")), "fp32", False),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", [GroupedConfig(128, 6), GroupedConfig(256, 4)], ids=str)
@pytest.mark.parametrize(
    ("gemm", "out", "added"),
    [*CUBINS[:4], *(pytest.param(*case, marks=pytest.mark.thorough) for case in CUBINS[4:])],
    ids=str,
)
def test_cubin(gemm, out, added, config, tmp_path):
    """The tensor core multiplies FP8 values that copies brought, nothing is spilled, and sums of 128 columns begin at
    zero where they are promoted."""
    kinds = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}
    types = {"a_scale": "*fp32", "b_scale": "*fp32", "out": f"*{out}", "bounds": "*i32"}
    for name, element, rows in zip("ab", gemm.elements, (128, config.block_n), strict=True):
        box = grouped_mm.box(rows)
        types[name] = f"tensordesc<{kinds[element]}{box.shape},{box.layout!r}>"
    constants = grouped_mm.constants(gemm, config, added) | {"bias": None}
    if gemm.scopes == ("1x128", "1x128"):
        box = grouped_mm.box_of_scales()
        types["b_scales"] = f"tensordesc<fp32{box.shape},{box.layout!r}>"
    else:
        constants["b_scales"] = None
    made = compiled(grouped_kernel.grouped, constants, types, grouped_mm.options())
    assert made.metadata.shared <= sm90.LIMITS.shared_memory
    lines = disassembled(made.asm["cubin"], tmp_path)
    operations = [line.split()[0] for line in lines]
    assert not any(operation.startswith(("LDL", "STL")) for operation in operations)
    products = [line for line in lines if line.startswith("QGMMA")]
    fast, parts = gemm.fast_accum, config.block_n // 128
    width = config.block_n if fast else 128
    name = f"QGMMA.64x{width}x32.F32.{gemm.elements[0].upper()}.{gemm.elements[1].upper()}"
    assert len(products) == 2 * 4 * (1 if fast else parts)
    assert all(line.split()[0].startswith(name) for line in products)
    assert sum("RZ" in line for line in products) == (0 if fast else 2 * parts)
    assert any(operation.startswith("UTMALDG") for operation in operations)
    assert not any(operation.startswith(("ATOM", "RED")) for operation in operations)
