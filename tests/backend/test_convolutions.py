"""Convolutions of one element are linear layers over the channels where these are last in memory; others are named and
counted, and are no fallback."""

import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import te_inductor
from te_inductor import recipes
from te_inductor.errors import FallbackWarning
from te_inductor.passes.pre_grad.sites import convolutions
from tests import uncompiled
from tests.support.layers import linears

INNER, OUTER = 64, 96
RELATIVE = 2.0**-4  # of what E4M3 rounds an operand by, at most
OUTSIDE = {
    "kernel": nn.Conv2d(INNER, OUTER, 3),
    "stride": nn.Conv2d(INNER, OUTER, 1, stride=2),
    "padding": nn.Conv2d(INNER, OUTER, 1, padding=1),
    "groups": nn.Conv2d(INNER, OUTER, 1, groups=2),
    "patches": nn.Conv2d(INNER, OUTER, 2, stride=2),
    "depthwise": nn.Conv2d(INNER, INNER, 3, groups=INNER),
    "transposed": nn.ConvTranspose2d(INNER, OUTER, 2, stride=2, groups=2),
}


def image(last: bool = True, dims: int = 2, channels: int = INNER) -> Tensor:
    """An input whose channels are last in memory or not."""
    x = torch.randn(4, channels, *(6, 5, 3)[:dims])
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def trained(run: nn.Module, model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "current", **options})


@pytest.fixture
def uncompiled_graphs():
    seen: list[str] = []

    def compile_fx(*args, **_):
        return uncompiled.compile_fx(*args, see=lambda graph: seen.extend(str(node.target) for node in graph.nodes))

    with mock.patch("te_inductor.compat.compile_fx", compile_fx):
        yield seen


@pytest.mark.parametrize(
    ("options", "outer"), [({}, OUTER), ({"bias": False}, 87), ({"padding": "same", "dilation": 2}, OUTER)], ids=str
)
def test_a_layer_over_channels(options, outer, uncompiled_graphs):
    """Bit for bit the linear layer, and near the convolution in float64; 87 channels are padded."""
    model, x, dy = nn.Conv2d(INNER, outer, 1, **options), image(), image(channels=outer)
    found = trained(compiled(model, fallback="error"), model, x, dy)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    layer = nn.Linear(INNER, outer, bias=model.bias is not None)
    layer.load_state_dict({name: one.flatten(1) if one.dim() > 1 else one for name, one in model.state_dict().items()})
    slots = recipes.resolve("current").slots()

    def linear(x: Tensor) -> Tensor:
        biases = [] if layer.bias is None else [layer.bias]
        return linears(x.movedim(1, -1), [layer.weight], biases, slots, x.dtype)[0].movedim(-1, 1)

    for one, other in zip(found, trained(linear, layer, x, dy), strict=True):
        assert torch.equal(one, other.view_as(one))
    exact = trained(model.double(), model, x.double(), dy.double())
    for one, right in zip(found, exact, strict=True):
        assert (one - right).norm() < 2 * RELATIVE * right.norm()


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions(dims):
    model = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](INNER, OUTER, 1)
    x = image(dims=dims)
    site = te_inductor.explain(model, x, options={"recipe": "current"}).sites[0]
    is_last = convolutions.has_channels_last(model(x))  # torch decides what it returns
    assert (site.pattern, site.recipe) == ("linear" if is_last else "convolution", "current")
    assert site.shapes == (x.numel() // INNER, OUTER, INNER)


def test_channels_elsewhere_are_refused():
    report = te_inductor.explain(nn.Conv2d(INNER, OUTER, 1), image(last=False), options={"recipe": "current"})
    [site] = report.fallbacks
    assert (site.pattern, site.kernel, site.reason) == ("convolution", "high_precision", str(convolutions.LAYOUT))


@pytest.mark.parametrize("what", OUTSIDE)
def test_others_are_named_and_no_fallback(what, uncompiled_graphs):
    """Their FLOPs count in the share, and nothing warns of them."""
    model, x = nn.Sequential(OUTSIDE[what], nn.Conv2d(OUTSIDE[what].out_channels, OUTER, 1)), image()
    model.to(memory_format=torch.channels_last)
    y = model[0](x)
    report = te_inductor.explain(model, x, options={"recipe": "current"})
    site, low = report.sites[-1], report.sites[0]
    assert (site.fqn, site.pattern, site.recipe, site.kernel) == ("0", "convolution", "none", "high_precision")
    assert site.reason == str(convolutions.OUTSIDE) and site.outside and not report.fallbacks
    elements = x.numel() // INNER if what == "transposed" else y.numel() // model[0].out_channels
    assert site.flops == 2 * elements * model[0].weight.numel()
    assert report.flops.share == low.flops / (low.flops + site.flops)
    assert f"0 ({site.flops / report.flops.total:.1%} of FLOPs): {convolutions.OUTSIDE}" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert te_inductor.assert_low_precision(compiled(model, fallback="error"), x).sites


def test_options_are_about_layers():
    """No option is said not to reach what has no recipe."""
    model = nn.Sequential(OUTSIDE["padding"], nn.Flatten(2), nn.Linear(56, OUTER))
    assert not te_inductor.explain(model, image(), options={"recipe": "current", "wgrad": "deferred"}).unmet


def test_a_policy_entry_cannot_give_it_a_recipe():
    """One that leaves it in high precision is met."""
    policy = {"0": "mxfp8", "1": "none", "2": "current"}
    model = nn.Sequential(OUTSIDE["kernel"], nn.Conv2d(OUTER, OUTER, 3), nn.Conv2d(OUTER, OUTER, 1))
    model.to(memory_format=torch.channels_last)
    assert te_inductor.explain(model, image(), options={"policy": policy}).unused_policy == ["0"]


def test_a_layer_that_stays_is_a_convolution_again(uncompiled_graphs):
    model = nn.Sequential(nn.Conv2d(INNER, OUTER, 1), nn.Flatten(2), nn.Linear(30, 32))
    compiled(model, policy={"0": "none"})(image())
    assert "aten.convolution.default" in uncompiled_graphs


def test_dtensors_stay_as_they_are():
    """Their views may redistribute them; the rest of the graph runs in low precision."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        convolution = distribute_module(nn.Conv2d(INNER, OUTER, 1).to(memory_format=torch.channels_last), mesh)
        linear = nn.Linear(OUTER, OUTER)

        def run(x: Tensor) -> Tensor:
            return linear(convolution(DTensor.from_local(x, mesh, [Shard(0)])).to_local().movedim(1, -1))

        report = te_inductor.explain(run, image(), options={"recipe": "current"})
    finally:
        torch.distributed.destroy_process_group()
    assert report.failure is None and {site.pattern: site.reason is None for site in report.sites} == {
        "linear": True,
        "convolution": False,
    }
