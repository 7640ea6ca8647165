"""Experts in MXFP8, MXFP4 and NVFP4 by torch's library on Blackwell, without one: the order of scales by its definition,
element by element, and layers with a stand-in for the product (tests/grouped_library.py), which are what emulated GEMMs
make them, bit for bit, and within the oracle's bounds."""

import pytest
import torch
from torch import Tensor

from te_inductor import explain, ops, targets
from te_inductor.kernels import plain
from te_inductor.kernels.grouped_mm import LIBRARY
from te_inductor.kernels.problem import Problem, Program, Sizes
from te_inductor.recipes import Format, Gemm, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_inductor.runtime.eager import grouped
from te_inductor.targets import Target, cpu, sm100
from tests import grouped_library as stand_in
from tests.support import grouped_layers as layers
from tests.support.layers import grouped_linears

pytestmark = pytest.mark.usefixtures("known_seeds")


SIZES = {"many": (0, 1, 17, 130, 0, 128), "rows behind": (40, 0, 3), "one has all": (0, 90, 0)}  # even in all
BEHIND = {SIZES["rows behind"]: 21}

GROUPED_LIBRARY, EMULATED = LIBRARY.name, plain.EMULATED.name


@pytest.fixture
def library(monkeypatch):
    """Makes every tensor seem to be on such a GPU; counts how often each product was called."""
    calls: list[str] = []

    def counted(name: str, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(torch, name, call, raising=False)

    def install() -> list[str]:
        monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=ON")
        monkeypatch.setattr(targets, "of", lambda device: sm100.target((10, 0), "13.0"))
        counted("_scaled_grouped_mm", stand_in.product)
        counted("_scaled_grouped_mm_v2", stand_in.product_of_four_bits)
        return calls

    return install


NEAREST = {"disable_stochastic_rounding": True}
RECIPES = {  # equal bit for bit: the library has their factors, and no random bits follow from where a group begins
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 squares": MXFP8BlockScaling(enable_2d_quantization=True),
    "mxfp4": MXFP4BlockScaling(**NEAREST),
    "mxfp4 rows": MXFP4BlockScaling(**NEAREST, disable_2d_quantization=True, disable_rht=True),
    "nvfp4": NVFP4BlockScaling(**NEAREST),
    "nvfp4 rows": NVFP4BlockScaling(**NEAREST, disable_2d_quantization=True, disable_rht=True),
    "nvfp4 4 over 6": NVFP4BlockScaling(**NEAREST, disable_rht=True, nvfp4_4over6="all"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer(recipe, sizes, library):
    """Output and gradients of what emulation computes, also of experts without rows; rows that are gathered, a bias."""
    slots = RECIPES[recipe].slots()
    ends = torch.tensor(sizes).cumsum(0).int()
    rows = int(ends[-1]) + BEHIND.get(sizes, 0)
    order = torch.randperm(rows)
    x = torch.randn(rows // 2, 80).bfloat16().requires_grad_()
    w = torch.randn(len(sizes), 48, 80).bfloat16().requires_grad_()
    bias = torch.randn(len(sizes), 48).bfloat16().requires_grad_()
    dy = torch.randn(rows, 48).bfloat16()

    def layer() -> list[Tensor]:
        given = x, [w], [bias], ends, slots, torch.bfloat16, order // 2, ops.places_of(order, 2)
        [y] = grouped_linears(*given)
        return [y, *torch.autograd.grad(y, (x, w, bias), dy)]

    expected = layer()
    calls = library()
    for found, emulated in zip(layer(), expected, strict=True):
        assert found.dtype == emulated.dtype and torch.equal(found, emulated)
    assert calls == 3 * ["_scaled_grouped_mm" + ("_v2" if slots.fprop.packed > 1 else "")]


@pytest.mark.quick("mxfp4", "nvfp4", "factors of rows")
@pytest.mark.parametrize("name", [*RECIPES, "factors of rows", "random mxfp4", "random nvfp4"])
def test_layer_against_the_oracle(name, library, monkeypatch):
    more = {
        "factors of rows": NVFP4BlockScaling(**NEAREST, disable_rht=True, row_scaled_activation=True),
        "random mxfp4": MXFP4BlockScaling(),
        "random nvfp4": NVFP4BlockScaling(),
    }
    slots, calls = (RECIPES | more)[name].slots(), library()
    sizes = (17, 130, 1) if "random" in name else (0, 1, 17, 0, 130)  # the oracle's empty groups have no tile
    if (
        name == "factors of rows"
    ):  # they multiply what was rounded: once more, and by no more than the bound has already
        error_of = layers.error_of
        monkeypatch.setattr(layers, "error_of", lambda *product: 2 * error_of(*product))
    x, weights, biases, dy, order = layers.inputs(sizes, 20, (48,), 80, torch.bfloat16, True, 2)
    ends = layers.ends_of(sizes)
    ys = layers.run(grouped_linears, x, weights, biases, ends, slots, order, 2, dy, torch.bfloat16)
    assert len(calls) == 3
    layers.check(x, weights, biases, sizes, slots, ys, dy, order // 2)


def test_gradients_that_the_library_does_not_take(library):
    """E5M2's: fprop is its product, and the others are not."""
    slots = MXFP8BlockScaling(fp8_format=Format.HYBRID).slots()
    x, w = (torch.randn(size).bfloat16().requires_grad_() for size in ((32, 64), (2, 48, 64)))
    calls = library()
    [y] = grouped_linears(x, [w], [], layers.ends_of((16, 16)), slots, torch.bfloat16)
    y.sum().backward()
    assert calls == ["_scaled_grouped_mm"]


@pytest.mark.parametrize(("recipe", "called"), [("mxfp8", 1), ("mxfp4", 0), ("nvfp4", 0)])
def test_programs_that_leave(recipe, called, library, monkeypatch):
    """torch has no fake kernel of four bits' product, through which such a program would be traced."""
    slots, calls = RECIPES[recipe].slots(), library()
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(2, 48, 64).bfloat16()
    grouped_linears(x, [w], [], layers.ends_of((16, 16)), slots, torch.bfloat16)
    assert len(calls) == called


HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)


class Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 48, 64).to(dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.bfloat16().transpose(1, 2), offs=ends)


def reported(layer, recipe, **options) -> dict[str, tuple]:
    """Kernel and reason of each GEMM."""
    given = (torch.randn(32, 64).bfloat16().requires_grad_(), layers.ends_of((16, 16)))
    report = explain(layer, *given, options={"policy": {"*": recipe}, **options})
    return {site.gemm: (site.kernel, site.reason) for site in report.sites}


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", HYBRID], ids=str)
def test_report(recipe, library):
    """What the library multiplies is not called emulated, and nothing else is called the library's."""
    library()
    found = reported(Layer(), recipe)
    kernels = [GROUPED_LIBRARY] * 3 if recipe is not HYBRID else [GROUPED_LIBRARY, EMULATED, EMULATED]
    assert [found[gemm][0] for gemm in ("fprop", "dgrad", "wgrad")] == kernels
    assert all((reason is None) == (kernel == GROUPED_LIBRARY) for kernel, reason in found.values())
    assert {kernel for kernel, _ in reported(Layer(torch.float32), recipe).values()} == {EMULATED}


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_report_of_a_program(recipe, library):
    """torch's library has, in a package, MXFP8's products alone; code of a C++ wrapper cannot call ours."""
    library()
    program = torch.export.export(Layer(), (torch.randn(32, 64).bfloat16(), layers.ends_of((16, 16))))
    [site] = explain(program, options={"policy": {"*": recipe}}).sites
    assert site.kernel == (GROUPED_LIBRARY if recipe == "mxfp8" else EMULATED)
    assert ("exact values, multiplied in" in (site.reason or "")) == (recipe != "mxfp8")
    assert {kernel for kernel, _ in reported(Layer(), recipe, cpp_wrapper=True).values()} == {"high_precision"}


def test_where(monkeypatch):
    """The library multiplies on compute capability 10.0 alone, bf16 and E4M3, where torch was built with the
    library."""
    gemm, bf16 = MXFP8BlockScaling().slots().fprop, torch.bfloat16
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=ON")
    target = sm100.target((10, 0), "13.0")
    assert len(target.grouped_microscaled_mm) == 3
    assert not sm100.target((10, 3), "13.0").grouped_microscaled_mm
    assert not sm100.target((10, 0), "12.6").grouped_microscaled_mm

    def multiplies(gemm: Gemm, held: torch.dtype = bf16, leaves: bool = False, target: Target = target) -> bool:
        sizes, program = Sizes(None, None, None, experts=0), Program(leaves=leaves)
        return LIBRARY.supports(Problem(target, sizes, gemm, bf16, program=program, held=held)) is None

    assert not multiplies(gemm, target=cpu.TARGET)
    assert multiplies(gemm)
    assert not multiplies(gemm, torch.float32)
    assert not multiplies(Gemm("fprop"))
    assert not multiplies(Gemm("dgrad", False, ("1x32", "1x32"), ("e5m2", "e4m3")))
    for scope in ("1x16", "1x32"):
        four_bits = Gemm("fprop", False, (scope, scope), ("e2m1", "e2m1"))
        assert multiplies(four_bits)
        assert not multiplies(four_bits, leaves=True)
    assert multiplies(gemm, leaves=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.__config__, "show", lambda: "")
    assert not sm100.target((10, 0), "13.0").grouped_microscaled_mm


def test_groups_have_room():
    """There is room for a tile of each empty group, whatever the others are."""
    for sizes in ((0,) * 5, (1,) * 5, (129, 0, 0, 0, 0), (640, 0, 1, 0, 127)):
        ends = torch.tensor(sizes).cumsum(0).int()
        starts, tiles, source = grouped.layout(ends, sum(sizes), grouped.GROUP_ALIGNMENT)
        assert starts.diff().ge(128).all() and starts[-1] <= len(source) == 128 * len(tiles)
        assert (source >= 0).sum() == sum(sizes)
