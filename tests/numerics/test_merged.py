"""Linear layers of one input as one GEMM: against the oracle of one layer with all their rows; what keeps them
apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import explain
from te_inductor.recipes import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Format
from tests.bounds import assert_within, gemm_error, sum_error
from tests.oracle import casts


class Layers(nn.Module):
    """Three layers of one input; `use` is what is done with their outputs."""

    def __init__(self, sizes=(48, 16, 32), bias=True, use=None, k=48):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=bias) for n in sizes)
        self.use = use or (lambda ys: [y * 2 for y in ys])

    def forward(self, x):
        return self.use([layer(x) for layer in self.layers])


def merged(model, *inputs, **options):
    return {len(site.merged) for site in explain(model, *inputs, options=options).sites}


RECIPES = {
    "current": (Float8CurrentScaling(fp8_format=Format.HYBRID), 1),
    "rowwise": (Float8RowwiseScaling(), 1),
    "block": (Float8BlockScaling(), 128 // 16),  # of whole blocks
}


@pytest.mark.quick("torch.float32-True-33-rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("dtype", "bias", "rows"), [(torch.float32, True, 33), (torch.bfloat16, False, 64)], ids=str)
def test_against_one_layer_with_all_rows(dtype, bias, rows, recipe):
    recipe, times = RECIPES[recipe]
    model = Layers(tuple(times * n for n in (48, 16, 32)), bias, k=times * 48).to(dtype)
    with torch.no_grad():  # layers of different ranges: their scale is that of the widest
        for place, layer in enumerate(model.layers):
            layer.weight.mul_(4.0**place)
    x = torch.randn(rows, times * 48, dtype=dtype, requires_grad=True)
    options = {"recipe": recipe, "fallback": "error"}
    assert merged(model, x, **options) == {3}
    ys = torch.compile(model, backend="te", fullgraph=True, options=options)(x)
    dys = [torch.randn_like(y) for y in ys]
    torch.autograd.backward(ys, dys)

    weight = torch.cat([layer.weight.detach() for layer in model.layers])
    added = torch.cat([layer.bias.detach() for layer in model.layers]) if bias else None
    dy, slots = torch.cat(dys, 1) * 2, recipe.slots()  # what stands behind the layers doubles, which is exact
    y, dx, dw, db = casts.linear(x.detach(), weight, added, recipe, dy)
    x_row, x_col = _copies(x.detach(), slots.input)
    w_row, w_col = _copies(weight, slots.weight)
    g_row, g_col = _copies(dy, slots.grad_output)
    found = torch.cat(ys, 1).detach() / 2
    assert_within(found, y, gemm_error(*x_row, *w_row, added, dtype, slots.fprop), "y")
    assert_within(x.grad, dx, gemm_error(*g_row, *w_col, None, dtype, slots.dgrad), "dx")
    dws = torch.cat([layer.weight.grad for layer in model.layers])
    assert_within(dws, dw, gemm_error(*g_col, *x_col, None, dtype, slots.wgrad), "dw")
    if bias:
        assert_within(torch.cat([layer.bias.grad for layer in model.layers]), db, sum_error(dy, dtype), "db")


def _copies(x, quantizer):
    data, scale_inv, data_t, scale_inv_t = casts.quantize_rowcol(x, quantizer)
    return (data, scale_inv), (data_t, scale_inv_t)


APART = {
    "an output": lambda ys: ys,
    "an output behind a view": lambda ys: [y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in ys],
    "a view that merges rows": lambda ys: [y.view(-1, y.shape[-1]) * 2 for y in ys],
    "a view behind a reordering": lambda ys: [
        y.unflatten(-1, (-1, 8)).transpose(2, 3).unflatten(-1, (1, -1)) * 2 for y in ys
    ],
    "changed in place": lambda ys: [y.mul_(2) * 2 for y in ys],
}
TOGETHER = {
    "split heads": lambda ys: [y.view(*y.shape[:-1], -1, 8).transpose(1, 2) * 2 for y in ys],
    "reshape across rows": lambda ys: [y.reshape(-1, y.shape[-1]) * 2 for y in ys],
    "complex rotations": lambda ys: [
        torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * 1j).flatten(-2) for y in ys
    ],
    "activation": lambda ys: [F.silu(y) for y in ys],
}


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("codegen", [False, pytest.param(True, marks=[pytest.mark.codegen, pytest.mark.thorough])])
@pytest.mark.parametrize("use", [*APART, *TOGETHER])
def test_only_what_cannot_tell_a_slice_is_merged(use, codegen):
    """The program, merged or not, computes what it computes without this package, up to quantization."""
    model = Layers(use=(APART | TOGETHER)[use])
    x = torch.randn(2, 6, 48)
    assert merged(model, x) == ({0} if use in APART else {3})
    with torch.no_grad():
        expected, found = model(x), torch.compile(model, backend="te", fullgraph=True, options={"fallback": "error"})(x)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        assert (a - b).norm() < 0.1 * a.norm()


class Attention(nn.Module):
    """Attention and an MLP of one input; `norms` of q and k, which are saved for their gradients as the MLP's slice is."""

    def __init__(self, dim=64, wide=256, kv=64, norms=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, size, bias=False) for size in (dim, kv, kv))
        self.up = nn.Linear(dim, wide, bias=False) if wide else None
        self.norm = nn.RMSNorm(16) if norms else lambda y: y * 2

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(-1, -1, q.shape[1] // y.shape[1], -1, -1).flatten(1, 2) for y in (k, v))
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)
        return y.sum() if self.up is None else y.sum() + F.gelu(self.up(x)).sum()


@pytest.mark.parametrize(
    ("model", "training", "inference"),
    [
        (Attention(), ["q k v"], ["q k v up"]),
        (Attention(norms=True), ["q k up"], ["q k v up"]),
        (Attention(wide=0), ["q k v"], ["q k v"]),
        (Attention(wide=0, kv=32), ["q k v"], ["q k v"]),  # k and v are copied for the heads that share them
        (Attention(wide=0, norms=True), ["q k"], ["q k v"]),
        (Attention(wide=0, kv=16, norms=True), ["q k v"], ["q k v"]),  # v is less than the input's FP8 copy saves
    ],
)
def test_a_slice_that_is_saved_keeps_little_else(model, training, inference):
    x = torch.randn(2, 6, 64)
    for grad, expected in ((True, training), (False, inference)):
        with torch.set_grad_enabled(grad):
            sites = explain(model, x.requires_grad_(grad), options={"recipe": "current"}).sites
        groups = {frozenset((site.fqn, *site.merged)) for site in sites if site.gemm == "fprop" and site.merged}
        assert groups == {frozenset(group.split()) for group in expected}


def test_what_differs_stays_apart():
    x = torch.randn(4, 6, 48)
    assert merged(Layers(sizes=(40, 56)), x) == {0}  # no multiples of 16
    frozen = Layers(sizes=(32, 32))
    frozen.layers[0].requires_grad_(False)
    assert merged(frozen, x) == {0}
    assert merged(Layers(sizes=(32, 32)), x, policy={"layers.0": "none"}) == {0}
    assert merged(Layers(sizes=(32, 32)), x, policy={"layers.0": "rowwise"}) == {0}
    assert merged(Layers(sizes=(32, 32)), x, recipe="block") == {0}  # nor whole blocks
    assert merged(Layers(sizes=(32, 32)), x, recipe="mxfp8") == {0}
    assert merged(Layers(sizes=(32, 32)), x, recipe="rowwise") == {2}
    assert merged(Layers(sizes=(32, 32)), x, recipe="delayed") == {2}
