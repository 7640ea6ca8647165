"""The output layers that stay in high precision for the sake of memory."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from te_inductor import explain
from te_inductor.passes.pre_grad.decide import memory_rule
from tests.rates import rated

ROWS, DIM, WORDS = 8192, 2048, 32768


class Stack(nn.Module):
    """Layers, of which each keeps its input for its backward, and an output layer with its loss."""

    def __init__(self, depth: int, words: int = WORDS, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(depth))
        self.head, self.again = nn.Linear(DIM, words, bias=False), again

    def forward(self, x, labels):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = x.sin()
        return nn.functional.cross_entropy(self.head(x).float(), labels)


def head(monkeypatch, depth, learns=True, **made):
    """The report's site of the output layer; tensors have no memory."""
    rated(monkeypatch)
    torch._dynamo.reset()
    options = {"recipe": "delayed", "mode": "reduce-overhead", **made.pop("options", {})}
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model, x = Stack(depth, **made), torch.randn(ROWS, DIM)
        model.head.weight.requires_grad_(learns)
        report = explain(model, x, torch.zeros(ROWS, dtype=torch.int64), options=options)
    assert report.failure is None
    return [site for site in report.sites if site.fqn == "head"]


def test_layers_in_front_pay(monkeypatch):
    """Two bytes an element of the gradient, for two an element of each layer's input: 16 layers."""
    few, enough = head(monkeypatch, 15), head(monkeypatch, 16)
    assert len(few) == len(enough) == 3 and all(site.reason is None for site in enough)
    assert {str(site.reason) for site in few} == {
        "the gradient of its output would take 512 MiB more than in bf16, and the graph's other layers save 480 MiB (a"
        " policy entry overrides this)"
    }


def test_one_copy_of_the_gradient(monkeypatch):
    """A frozen layer has one GEMM in the backward."""
    assert head(monkeypatch, 7, learns=False)[0].reason is not None
    assert head(monkeypatch, 8, learns=False)[0].reason is None


def test_layers_that_are_computed_again_save_nothing(monkeypatch):
    [reason] = {str(site.reason) for site in head(monkeypatch, 16, again=True)}
    assert "other layers save 0 MiB" in reason


def test_what_is_left_alone(monkeypatch):
    """What a policy names, and a layer that is not wide."""
    assert head(monkeypatch, 1, options={"policy": {"*": "delayed"}})[0].reason is None
    assert "MiB" not in str(head(monkeypatch, 1, words=3 * DIM)[0].reason)


def test_inference_has_no_gradient(monkeypatch):
    with torch.no_grad():
        assert "MiB" not in str(head(monkeypatch, 1)[0].reason)


def test_a_deep_graph_is_not_walked_more_often(monkeypatch):
    """A walk for each layer of 32 would take as long as the rest of a start with full caches."""
    walks, walk = [], memory_rule.in_order
    monkeypatch.setattr(memory_rule, "in_order", lambda root: walks.append(root) or walk(root))
    head(monkeypatch, 2)
    few = len(walks)
    head(monkeypatch, 16)
    assert len(walks) == 2 * few > 0
