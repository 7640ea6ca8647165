"""Routers: what chooses experts stays in high precision, however its scores become a choice, and other layers do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.experts import HIDDEN, MoE
from tests.support.expert_layers import PATHS, sites, tokens

pytestmark = pytest.mark.usefixtures("without_tracing")


def test_a_router_stays_in_high_precision():
    """It does not if a policy names it."""
    model, x = MoE(experts=16), tokens()
    assert "a router: its outputs choose experts" in sites(model, x)["gate"][3]
    assert sites(model, x, policy={"gate": "rowwise"})["gate"] == ("rowwise", False, 0, None)
    assert sites(model, x, policy={"*": "current"})["gate"] == ("current", False, 0, None)

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x).topk(2).values

    assert not sites(Head(HIDDEN, 4096), x)[""][1]  # a vocabulary, from which a beam is chosen
    assert sites(Head(HIDDEN, 64), x)[""][1]
    assert not sites(nn.Sequential(nn.Linear(HIDDEN, 64), nn.Softmax(-1)), x)["0"][1]  # nothing is chosen

    class Classifier(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    assert not sites(Classifier(HIDDEN, 64), x)[""][1]


@pytest.mark.parametrize(
    "score", ["softmax", "sigmoid and bias", "groups", "fp32", "fp64", "of tokens", "least", "capped"]
)
def test_what_is_between_a_router_and_its_choice(score):
    class Router(nn.Linear):
        def forward(self, x):
            if score == "fp32":
                return F.linear(x.float(), self.weight.float()).topk(2, dim=-1).indices
            scores = super().forward(x)
            if score == "fp64":
                return scores.double().topk(2).indices
            if score == "of tokens":  # each expert chooses
                return scores.softmax(-1).transpose(0, 1).topk(2).indices
            if score == "least":
                return (-scores).topk(2).indices
            if score == "capped":
                return (30 * torch.tanh(scores / 30)).topk(2).indices
            if score == "softmax":
                return torch.softmax(scores, -1, dtype=torch.float32).topk(2).indices
            scores = scores.sigmoid() + torch.arange(8.0)
            if score == "groups":
                groups = scores.view(-1, 2, 4).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1)[1]
                scores = scores.view(-1, 2, 4)[torch.arange(len(x)), groups[:, 0]]
            return scores.topk(2)[1]

    [(_, high, _, reason)] = sites(Router(HIDDEN, 8), tokens()).values()
    assert high and "a router" in reason


def test_a_router_that_chooses_by_an_arg_max():
    """PhiMoE's does so: grouped products' offsets are made of its outputs."""

    class Switch(MoE):
        def forward(self, x):
            scores, ids = self.gate(x).max(-1)
            order = torch.argsort(ids)
            ends = (ids[:, None] == torch.arange(16)).sum(0).cumsum(0).int()
            y = self.experts(x[order], ends) * scores[order][:, None]
            return y[torch.argsort(order)]

    found = sites(Switch(experts=16), tokens())
    assert "a router" in found["gate"][3] and all(found[path][3] is None for path in PATHS)


class Sorted(MoE):
    """Rows that are chosen for by a model's own rule, behind a layer that is no router."""

    def __init__(self) -> None:
        super().__init__(experts=HIDDEN)  # as many as x is wide
        self.pre, self.centroids = nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def choose(self, h):
        raise NotImplementedError

    def forward(self, x):
        h = self.pre(x)
        ids = self.choose(h)
        order = torch.argsort(ids)
        ends = torch.histc(ids.float(), HIDDEN, 0, HIDDEN - 1).cumsum(0).int()
        return self.experts(h[order], ends)[torch.argsort(order)]


CHOICES = {
    "a part": lambda self, h: h[:, :16].argmax(-1),
    "distances": lambda self, h: torch.cdist(h, self.centroids).argmin(-1),
    "products by hand": lambda self, h: (h[:, None, :] * self.centroids).sum(-1).max(-1)[1],
    "a norm": lambda self, h: (h.norm(dim=-1) > 5).long(),
    "means": lambda self, h: h.view(len(h), HIDDEN // 2, 2).mean(-1).argmax(-1),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_router_that_is_no_product(choice):
    """What chooses there is not the last product before it."""
    kind = type("Kind", (Sorted,), {"choose": CHOICES[choice]})
    assert sites(kind(), tokens())["pre"] == ("current", False, 0, None)


SCORED = {
    "itself": lambda self, h: h.argmax(-1),
    "biased": lambda self, h: (h.float().softmax(-1) + self.centroids[0]).view(1, -1, HIDDEN).argmax(-1)[0],
    "masked": lambda self, h: torch.where(
        (h.amax(-1, keepdim=True) - h) / h.abs().clamp(min=1e-3) > 0.1, h, h - 1.0
    ).max(-1).indices,
}  # fmt: skip


@pytest.mark.parametrize("scores", SCORED)
def test_a_router_whose_scores_stay_in_their_places(scores):
    kind = type("Kind", (Sorted,), {"choose": SCORED[scores]})
    assert "a router" in sites(kind(), tokens())["pre"][3]
