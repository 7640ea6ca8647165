"""Mixtures of experts of transformers, tiny and with random weights: every expert site is found, a step computes what
eager code with the same low-precision experts computes, and a model learns as it does in high precision.

The reference is the model itself with its grouped product replaced by `grouped_linears` or its batched one by
`linears`. All but experts is left in high precision, and models have one layer: so the routing, which is in front of
the first low-precision product, is the same in all runs, and only the experts' noise tells them apart. With e the
reference's distance from high precision, te's distance from the reference is at most 2 ‖e‖ times the slack of
tests/models/test_transformers.py, which derives it; te is no nearer to high precision than ‖e‖ / 2 / slack; and ‖e‖
itself lies between limits of the formats."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import explain
from tests.experts import MoE
from tests.recipes import quick
from tests.support.expert_models import (
    MODELS,
    build,
    check,
    inputs,
    three,
)

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")
thorough = pytest.mark.thorough


# The sites of experts: those of one parameter each; of Llama 4's batched products both are the module's.
SITES = {"llama4": ["experts"]}
ROUTERS = {"gpt_oss": "router", "llama4": "router"}


@pytest.mark.quick("mixtral", "gpt_oss")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=thorough) if name in ("deepseek_v3", "glm4_moe") else name for name in MODELS],
)
def test_every_expert_is_found(name):
    model, x = build(name), inputs().requires_grad_()
    report = explain(model, inputs_embeds=x, options={"recipe": "rowwise"})
    assert report.failure is None
    experts = {site.fqn: site for site in report.sites if ".experts" in site.fqn and "shared" not in site.fqn}
    ends = SITES.get(name, ["experts.gate_up_proj", "experts.down_proj"])
    assert sorted(path.partition("experts")[1] + path.partition("experts")[2] for path in experts) == sorted(ends)
    assert all(site.kernel != "high_precision" and site.recipe == "rowwise" for site in experts.values())
    gemms = [site.gemm for site in report.sites if site.fqn in experts]
    assert sorted(gemms) == sorted(2 * ["fprop", "dgrad", "wgrad"])
    [reason] = {site.reason for site in report.sites if site.fqn.endswith(ROUTERS.get(name, "mlp.gate"))}
    assert "a router" in reason
    others = [site for site in report.fallbacks if site.reason != reason]
    assert not others, others


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("current", marks=thorough)])
@pytest.mark.parametrize(
    "name", [name if name == "qwen3_moe" else pytest.param(name, marks=thorough) for name in MODELS]
)
def test_a_step(name, recipe, monkeypatch):
    for high, low, te in three(name, recipe, monkeypatch):
        check(high, low, te)


def test_the_bounds_catch(monkeypatch):
    """A gradient that is dropped, one with a scale that is 25% off, and a model that never quantizes."""
    [(high, low, te)] = three("qwen3_moe", "rowwise", monkeypatch, 1)
    [path] = [path for path in te if path.endswith("down_proj")]
    for fault in (torch.zeros_like(te[path]), te[path] * 1.25):
        with pytest.raises(AssertionError, match="of the quantization noise away"):
            check(high, low, {**te, path: fault})
    with pytest.raises(AssertionError, match="than FP8 can be"):
        check(high, low, high)


class Language(nn.Module):
    """Predicts which token is next, by experts alone: what is before and behind them does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.moe, self.head = nn.Embedding(32, 32), MoE(), nn.Linear(32, 32, bias=False)
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.moe(self.embedding(tokens)))


def curve(recipe: str | None, steps: int, broken: bool = False) -> torch.Tensor:
    """Losses on a chain of tokens, whose entropy is what they tend to. Tokens, and so the routing, change each step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    chain = torch.softmax(3 * torch.randn(32, 32), -1)
    model = Language()
    policy = {"moe.gate": "none", "head": "none"}
    run = model if recipe is None else torch.compile(
        model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": policy}
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (256,))
        loss = F.cross_entropy(run(tokens), torch.multinomial(chain[tokens], 1)[:, 0])
        loss.backward()
        if broken:
            for p in model.moe.experts.parameters():
                p.grad.neg_()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


APART = {"nvfp4": 0.06, "mxfp4": 0.06}  # of the mean of the last third; 0.02 of others


@functools.cache
def in_high_precision(steps: int) -> torch.Tensor:
    return curve(None, steps)


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=thorough)])
@quick("rowwise")
def test_loss_curves(name, steps):
    """The curves are as in high precision; every step's loss is finite, and it learns."""
    if name == "block":
        pytest.skip("these experts are too narrow for blocks of 128")
    high, losses = in_high_precision(steps), curve(name, steps)
    last, tail = slice(-steps // 3, None), APART.get(name, 0.02)
    assert losses.isfinite().all()
    assert (losses[last].mean() - high[last].mean()).abs() <= tail * high[last].mean()
    assert losses[last].mean() < 0.95 * losses[0]


def test_a_wrong_gradient_shows_in_the_curve():
    wrong, high = curve("rowwise", 30, broken=True), in_high_precision(30)
    assert (wrong[-10:].mean() - high[-10:].mean()).abs() > 0.1 * high[-10:].mean()
