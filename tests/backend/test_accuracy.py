"""accuracy_report: its figures against the oracle's, and what it leaves alone."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from te_inductor import accuracy_report
from te_inductor.errors import OptionError
from te_inductor.recipes import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.oracle import casts, microscaling


def decibels(exact: torch.Tensor, low: torch.Tensor) -> float:
    return 10 * math.log10(exact.double().square().sum() / (low.double() - exact.double()).square().sum())


def stands_for(copy: casts.Copy, quantizer, columns: int) -> torch.Tensor:
    factor = 1.0 if copy.amax is None else copy.amax / (6 * 448)
    return casts.dequantize(copy.data, copy.scale_inv, quantizer.scope)[:, :columns] * factor


RECIPES = [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_figures_of_one_layer(recipe):
    layer, x, dy = nn.Linear(64, 48), torch.randn(32, 64, requires_grad=True), torch.randn(32, 48)
    report = accuracy_report(layer, x, options={"recipe": recipe}, loss=lambda y: (y * dy).sum())
    slots, weight = recipe.slots(), layer.weight.detach()
    tensors = {"input": x.detach(), "weight": weight, "grad_output": dy}
    made = {name: casts.copies(tensor, getattr(slots, name)) for name, tensor in tensors.items()}
    which = {"fprop": (0, 0), "dgrad": (0, 1), "wgrad": (1, 1)}
    assert [gemm.gemm for gemm in report.gemms] == list(which)
    for gemm in report.gemms:
        exact = []
        for operand, column in zip((gemm.a, gemm.b), which[gemm.gemm], strict=True):
            quantizer, copy = getattr(slots, operand.tensor), made[operand.tensor][column]
            tensor = tensors[operand.tensor].t() if column else tensors[operand.tensor]
            exact.append(tensor)
            if quantizer.hadamard and column:
                tensor = microscaling.hadamard(tensor)
                assert "transformed" in operand.format
            low = stands_for(copy, quantizer, tensor.shape[1])
            assert operand.amax == pytest.approx(tensor.abs().max().item(), rel=2**-8)
            assert operand.sqnr_db == pytest.approx(decibels(tensor, low), abs=0.1)
            lost = ((low == 0) & (tensor != 0)).double().sum() / (tensor != 0).double().sum()
            assert operand.underflowed == pytest.approx(lost.item(), abs=1e-3)
        rounded = casts.product(
            *(made[each.tensor][place] for each, place in zip((gemm.a, gemm.b), which[gemm.gemm], strict=True)),
            None,
            getattr(slots, gemm.gemm),
        )
        assert gemm.sqnr_db == pytest.approx(decibels(exact[0].double() @ exact[1].double().t(), rounded), abs=0.01)


def test_what_saturates_and_what_underflows():
    """A scale of 1 x 16 that is rounded down from 33/32 of a value of E4M3 cuts off what it was found from."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 17] = 6 * 448.0, 1.0, 6 * 32 * (1 + 1 / 32), 6 * 32.0
    layer = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        [gemm] = accuracy_report(layer, x.expand(4, 32), options={"recipe": "nvfp4"}).gemms
    assert gemm.gemm == "fprop" and gemm.a.amax == 2688
    assert gemm.a.saturated == pytest.approx(4 / 128) and gemm.a.underflowed == pytest.approx(1 / 4)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def test_a_whole_model(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    model, x = Checkpointed(), torch.randn(8, 4, 32)
    state = torch.get_rng_state()
    report = accuracy_report(model, x, options={"recipe": "nvfp4", "policy": {"body.2": "mxfp8"}})
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    found = {(gemm.fqn, gemm.gemm): gemm.recipe for gemm in report.gemms}
    # x wants no gradient; the head is too narrow
    assert found == {
        ("body.0", "fprop"): "nvfp4",
        ("body.0", "wgrad"): "nvfp4",
        **{("body.2", name): "mxfp8" for name in ("fprop", "dgrad", "wgrad")},
    }
    assert all(10 < gemm.sqnr_db < 40 for gemm in report.gemms)
    assert {site.fqn for site in report.sites if site.kernel == "high_precision"} == {"head"}
    text = str(report)
    assert "2 layers in low precision, 1 in high precision" in text and "e2m1 1x16 transformed stochastic" in text
    assert json.loads(json.dumps(report.to_dict()))["gemms"][0]["a"]["tensor"] == "input"
    pytest.importorskip("matplotlib")
    path = report.heat_map(tmp_path / "heat.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_experts_in_one_batched_product():
    experts = nn.Parameter(torch.randn(3, 32, 48))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = experts

        def forward(self, x):
            return torch.bmm(x, self.weight)

    report = accuracy_report(Experts(), torch.randn(3, 16, 32), options={"recipe": "current"})
    assert [gemm.gemm for gemm in report.gemms] == ["fprop", "wgrad"]
    assert report.gemms[0].b.amax == experts.abs().max().item()


@pytest.mark.parametrize("gathered", [False, True])
def test_experts_in_groups_of_rows(gathered):
    """Rows of all experts share a scale, each expert's weight has one; an expert without rows has no figures."""
    weight, ends = nn.Parameter(torch.randn(3, 32, 48, dtype=torch.bfloat16)), torch.tensor([16, 16, 40]).int()
    x = torch.randn(20 if gathered else 40, 32).bfloat16().requires_grad_()
    order = torch.randperm(40)

    def experts(x):
        return F.grouped_mm(x[order // 2] if gathered else x, weight, offs=ends)

    report = accuracy_report(experts, x, options={"recipe": "current"}, loss=lambda y: y.float().square().mean())
    assert [gemm.gemm for gemm in report.gemms] == ["fprop", "dgrad", "wgrad"]
    fprop, quantizer = report.gemms[0], Float8CurrentScaling().slots().input
    rows = (x[order // 2] if gathered else x).detach()
    low = stands_for(casts.copies(rows, quantizer)[0], quantizer, 32)
    assert fprop.a.sqnr_db == pytest.approx(decibels(rows, low), abs=0.1) and 20 < fprop.sqnr_db < 40
    assert fprop.b.amax == weight[[0, 2]].abs().max().item()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_other_recipes(recipe):
    report = accuracy_report(nn.Linear(128, 128), torch.randn(64, 128), options={"recipe": recipe})
    assert len(report.gemms) == 2 and all(20 < gemm.sqnr_db < 40 for gemm in report.gemms)


def test_a_loss_that_is_none():
    with pytest.raises(OptionError, match="expected a tensor of one number"):
        accuracy_report(nn.Linear(32, 32), torch.randn(4, 32), loss=lambda y: y)
    with pytest.raises(OptionError, match=r"loss is a float \(0.5\), expected a function of the model's output"):
        accuracy_report(nn.Linear(32, 32), torch.randn(4, 32), loss=0.5)
    report = accuracy_report(nn.Linear(32, 32), torch.randn(4, 32), options={"recipe": "none"})
    assert report.gemms == [] and "0 layers in low precision" in str(report)
