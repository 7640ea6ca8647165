"""Weight gradients are laid out as their parameters, also where those are (in, out): autograd takes such a gradient as
it is, and copies any other."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_inductor import explain, recipes
from te_inductor.recipes import CustomRecipe, Quantizer
from tests.recipes import every_stateless_recipe
from tests.support.layers import grouped_linears, linears
from tests.support.main_grads import te

M, N, K = 64, 48, 32


def turned(*sizes: int) -> nn.Parameter:
    """(…, N, K) that lies in memory as (…, K, N)."""
    *others, n, k = sizes
    return nn.Parameter((torch.randn(*others, k, n) / k**0.5).mT)


def plain(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().contiguous())


def gradients(run, parameters: list[nn.Parameter], kept: bool = True) -> list[Tensor]:
    """The gradients after a backward that copied none of them, where they are `kept`."""
    seen: dict[int, int] = {}
    hooks = [
        p.register_hook(lambda g, place=i: seen.__setitem__(place, g.data_ptr())) for i, p in enumerate(parameters)
    ]
    y = run(*parameters)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    for hook in hooks:
        hook.remove()
    for place, p in enumerate(parameters):
        assert not kept or (p.grad.stride() == p.stride() and p.grad.data_ptr() == seen[place]), place
    return [p.grad for p in parameters]


def same_values(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether these are the same products, summed up in another order."""
    return all(
        torch.allclose(a, b, rtol=0, atol=M * 2.0**-24 * b.abs().max()) for a, b in zip(found, expected, strict=True)
    )


@every_stateless_recipe
@pytest.mark.parametrize("layers", [1, 2])
def test_layers(name, layers, one_seed):
    """Several layers are one GEMM, and each gradient is laid out as its weight."""
    slots = recipes.resolve(name).slots()
    if layers > 1 and slots.fprop.microscaled:
        pytest.skip("never one GEMM")
    x, weights = torch.randn(M, K), [turned(N, K), turned(2 * N, K)][:layers]

    def run(*weights):
        return torch.cat(linears(x, list(weights), [], slots, torch.float32), 1)

    torch.manual_seed(0)
    found = gradients(run, weights)
    torch.manual_seed(0)
    assert same_values(found, gradients(run, list(map(plain, weights))))


@every_stateless_recipe
@pytest.mark.parametrize("layers", [1, 2])
def test_experts(name, layers, one_seed):
    slots = recipes.resolve(name).slots()
    scope = slots.weight.granularity
    if layers > 1 and not (scope.whole or (scope.transposes and not scope.microscaled)):
        pytest.skip("never one GEMM")
    ends = torch.tensor([20, 20, M - 4], dtype=torch.int32)
    x, weights = torch.randn(M, K), [turned(3, N, K), turned(3, 2 * N, K)][:layers]

    def run(*weights):
        return torch.cat(grouped_linears(x, list(weights), [], ends, slots, torch.float32), 1)

    torch.manual_seed(0)
    found = gradients(run, weights)
    torch.manual_seed(0)
    assert same_values(found, gradients(run, list(map(plain, weights)), kept=layers == 1))


def _e5m2_by_row(slot: str, module: str):
    elements = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
    return Quantizer(elements[slot], scope="row") if slot in elements else None


def test_operands_that_have_one_order():
    """torch multiplies E5M2 with scales of rows on the left alone: such a gradient is laid out as the GEMM has it."""
    slots = CustomRecipe(_e5m2_by_row).slots()
    assert not slots.wgrad.transposes
    x, weight = torch.randn(M, K), turned(N, K)
    [y] = linears(x, [weight], [], slots, torch.float32)
    [gradient] = torch.autograd.grad(y.sum(), [weight])
    assert gradient.is_contiguous()


class Forms(nn.Module):
    """Layers whose parameters are (in, out), as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.method, self.einsum = (nn.Parameter(torch.randn(K, N) / K**0.5) for _ in range(3))
        self.added, self.viewed = (nn.Parameter(torch.randn(N, K) / N**0.5) for _ in range(2))
        self.batch = nn.Parameter(torch.randn(2, N, K) / N**0.5)
        self.bias = nn.Parameter(torch.randn(K))

    def forward(self, x):
        x = torch.addmm(self.bias, x @ self.product, self.added)
        x = F.linear(x.matmul(self.method), self.viewed.t())
        x = torch.einsum("mk,kn->mn", x, self.einsum)
        return torch.bmm(x.view(2, -1, N), self.batch)


@pytest.mark.parametrize("codegen", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_forms(codegen, request):
    if not codegen:
        request.getfixturevalue("without_codegen")
    model, x = Forms(), torch.randn(M, K)
    gradients(lambda *_: te(model)(x), list(model.parameters()))
    shapes = {site.shapes for site in explain(model, x, options={"recipe": "current"}).sites if site.gemm == "wgrad"}
    assert shapes == {(K, N, M), (N, K, M)}  # of the transposed gradient
