"""Grouped FP8 GEMMs on a Hopper GPU: against float64, and replayed with groups of other sizes."""

import itertools

import pytest
import torch
from torch import Tensor

from te_inductor.kernels.grouped_mm import GroupedConfig
from te_inductor.recipes import Gemm
from tests import bounds, grouped
from tests.grouped import wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the kernel is Hopper's"
    ),
]

TENSOR, ROW, BLOCKS, BLOCKS_OF_ROWS = ("tensor",) * 2, ("row",) * 2, ("1x128", "128x128"), ("1x128",) * 2
SIZES = {
    "uneven": ((0, 1, 15, 16, 0, 17, 127, 128, 129), 0),
    "tail": ((130, 0, 3), 140),
    "all": ((0, 0, 1300, 0), 0),
    "none": ((0, 0), 5),
    "many": (tuple(range(128)), 11),
}
K_STEP = 32  # products that the tensor core aligns to the largest
KEPT = 2.0**-13  # of it


def poison() -> None:
    """What the outputs are allocated from."""
    torch.empty(1 << 26, device="cuda").fill_(torch.nan)


def imprecision(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm) -> Tensor:  # (M, N)
    """What the tensor core loses, besides fp32's roundings: of 32 products each at most a bit of those that the largest
    keeps. All products are at most the largest of a row's values times the largest of a column's; sums that it goes on
    with are as one more, of a size that K such products may reach."""
    from te_inductor.numerics import blocks
    from te_inductor.recipes.formats import ELEMENTS, SCOPES

    def largest(x: Tensor, scale: Tensor, which: int) -> Tensor:
        element, scope = ELEMENTS[gemm.elements[which]], SCOPES[gemm.scopes[which]]
        values = blocks.values(x, scale.float(), element, scope).abs().double()
        return torch.nn.functional.pad(values, (0, -values.shape[1] % K_STEP)).unflatten(1, (-1, K_STEP)).amax(2)

    top_a, top_b = largest(a, a_scale, 0), largest(b, b_scale, 1)
    each = top_a @ top_b.t()  # of every 32 columns the largest product, at most
    carried = each * min(a.shape[1], 128 if not gemm.fast_accum or gemm.blocked else a.shape[1]) / K_STEP
    return (each * K_STEP + carried * K_STEP) * KEPT


def with_imprecision(problem: grouped.Products, gemm: Gemm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    result, error = problem.expected(gemm, dtype)
    starts = [0, *problem.ends.tolist()]
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        if start < end:
            a_scale = grouped.rows_of(problem.a_scale, gemm.scopes[0], problem.a.shape[0], slice(start, end))
            b_scale = problem.b_scale[group].unsqueeze(1) if gemm.scopes[1] == "row" else problem.b_scale[group]
            error[start:end] += imprecision(problem.a[start:end], a_scale, problem.b[group], b_scale, gemm)
    return result, error


def assert_right(y: Tensor, expected: tuple[Tensor, Tensor], what: str) -> None:
    assert not y.isnan().any(), what
    bounds.assert_within(y.cpu(), *expected, what)
    # The bound is that of the worst case; a wrong scale of one group is seen in the norm.
    result = expected[0]
    if result.norm():
        assert (wide(y.cpu()) - result).norm() <= 4e-3 * result.norm(), what


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scopes", [TENSOR, ROW, ("row", "tensor"), BLOCKS], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_groups(sizes, scopes, fast, out_dtype):
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("fprop", fast, scopes)
    problem = grouped.products(*SIZES[sizes], 272, 2896 if sizes == "all" else 400, gemm, None)
    problem.a_scale.mul_(2.0**-6)  # within fp16
    problem.b_scale.mul_(2.0**-6)
    poison()
    y = grouped_mm(*problem.on("cuda"), gemm, out_dtype)
    assert y.dtype == out_dtype
    assert_right(y, with_imprecision(problem, gemm, out_dtype), sizes)
    assert (y[int(problem.ends[-1]) :] == 0).all()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("config", [(128, 6), (256, 4)], ids=str)
def test_more_turns_than_stages(config, fast):
    """Programs of several tiles, each of more stages than there is room for: who waits for a stage that nobody leaves
    would wait for ever."""
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("fprop", fast)
    a = torch.randn(8192, 2048, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(8, 1024, 2048, device="cuda").to(torch.float8_e4m3fn)
    ends = torch.tensor([1000, 1000, 3000, 4096, 5000, 6001, 7000, 8192], dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    y = grouped_mm(
        a, one, b, one.expand(8).contiguous(), ends, None, gemm, torch.float32, config=GroupedConfig(*config)
    )
    begin = 0
    for group, end in enumerate(ends.tolist()):
        expected = a[begin:end].float() @ b[group].float().t()
        assert (y[begin:end] - expected).norm() <= 1e-3 * expected.norm()
        begin = end


@pytest.mark.parametrize("config", [(128, 6), (256, 4), (256, 3, 4)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (128, 128), (272, 144), (2880, 720)], ids=str)
@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
@pytest.mark.parametrize("scopes", [ROW, BLOCKS], ids=str)
def test_sizes_of_experts(scopes, elements, n, k, config):
    """N and K that no tile divides, each element, and a bias."""
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("dgrad", False, scopes, elements)
    problem = grouped.products((70, 0, 200), 3, n, k, gemm, torch.bfloat16)
    poison()
    y = grouped_mm(*problem.on("cuda"), gemm, torch.bfloat16, GroupedConfig(*config))
    assert_right(y, with_imprecision(problem, gemm, torch.bfloat16), "bias")


def test_no_rows():
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("fprop", False, ROW)
    problem = grouped.products((0, 0), 0, 64, 64, gemm, None)
    assert grouped_mm(*problem.on("cuda"), gemm, torch.bfloat16).shape == (0, 64)


@pytest.mark.parametrize("scopes", [TENSOR, ROW, BLOCKS], ids=str)
def test_nan_stays_in_its_group(scopes):
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("fprop", False, scopes)
    problem = grouped.products((40, 50, 60), 0, 144, 144, gemm, None)
    result, error = with_imprecision(problem, gemm, torch.float32)
    problem.a[40:90], problem.b[1] = torch.nan, torch.nan
    y = grouped_mm(*problem.on("cuda"), gemm, torch.float32)
    assert y[40:90].isnan().all()
    for part in (slice(0, 40), slice(90, 150)):
        assert_right(y[part], (result[part], error[part]), "others")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scopes", [TENSOR, ROW, BLOCKS_OF_ROWS], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_wgrad(scopes, fast, added):
    """Empty groups, whose scales are NaN, and NaN behind the last. Of a total, its own rounding."""
    from te_inductor.templates.triton.grouped_mm import grouped_wgrad

    gemm = Gemm("wgrad", fast, scopes, ("e5m2", "e4m3"))
    for sizes, n, k in (((200, 0, 1, 128, 0), 144, 272), ((0, 0), 16, 16), ((1500,), 272, 2880), ((9,) * 64, 400, 528)):
        problem = grouped.gradients(sizes, 128, n, k, gemm)
        for dtype in (torch.float32,) if added else (torch.float32, torch.bfloat16):
            result, error = problem.expected(gemm, dtype)
            for group, (start, end) in enumerate(itertools.pairwise(problem.starts.tolist())):
                if start < end:
                    given = []
                    for x, scale in ((problem.a, problem.a_scale), (problem.b, problem.b_scale)):
                        if gemm.blocked:
                            scale = scale.view(-1, x.shape[0])[start // 128 : end // 128].flatten()
                        elif scale.dim():
                            scale = scale[group].unsqueeze(1)
                        given += [x[:, start:end], scale]
                    error[group] += imprecision(*given, gemm)
            total = torch.randn(result.shape) * float(result.abs().mean()) if added else None
            poison()
            out = None if total is None else total.cuda()
            y = grouped_wgrad(*problem.on("cuda"), gemm, dtype, out)
            assert out is None or y is out
            if total is not None:
                result = result + wide(total)
                error = error + bounds.UNIT[torch.float32] * (result.abs() + error)
            assert_right(y, (result, error), str(sizes))


@pytest.mark.parametrize("scopes", [ROW, BLOCKS], ids=str)
def test_graph(scopes):
    """A CUDA graph replayed with other sizes of groups, written in place: no size is read on the host."""
    from te_inductor.templates.triton.grouped_mm import grouped_mm

    gemm = Gemm("fprop", False, scopes)
    problem = grouped.products((100, 200, 0, 340), 0, 272, 400, gemm, None)
    given = problem.on("cuda")
    grouped_mm(*given, gemm, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_mm(*given, gemm, torch.bfloat16)
    for sizes in ((100, 200, 0, 340), (0, 0, 640, 0), (0, 0, 0, 0), (1, 2, 3, 4), (640, 0, 0, 0)):
        problem.ends.copy_(torch.tensor(sizes).cumsum(0))
        given[4].copy_(problem.ends)
        y.fill_(torch.nan)
        graph.replay()
        assert_right(y, with_imprecision(problem, gemm, torch.bfloat16), str(sizes))


@pytest.mark.parametrize("scopes", [ROW, BLOCKS_OF_ROWS], ids=str)
def test_wgrad_graph(scopes):
    from te_inductor.templates.triton.grouped_mm import grouped_wgrad

    gemm = Gemm("wgrad", False, scopes)
    problem = grouped.gradients((128, 256, 0, 128), 0, 144, 272, gemm)
    given = problem.on("cuda")
    grouped_wgrad(*given, gemm, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_wgrad(*given, gemm, torch.bfloat16)
    for sizes in ((128, 256, 0, 128), (0, 0, 512, 0), (0, 0, 0, 0), (512, 0, 0, 0), (128, 0, 0, 128)):
        problem.starts.copy_(torch.tensor((0, *sizes)).cumsum(0))
        given[4].copy_(problem.starts)
        problem.a_scale.nan_to_num_(1.0)  # of the group that was empty
        given[1].copy_(problem.a_scale)
        given[3].copy_(problem.b_scale.nan_to_num_(1.0))
        y.fill_(torch.nan)
        graph.replay()
        result = problem.expected(gemm, torch.bfloat16)[0]
        assert not y.isnan().any() and (wide(y.cpu()) - result).norm() <= 4e-3 * result.norm(), sizes
