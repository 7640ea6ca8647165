"""The size rule against the table it was made from, docs/performance.md: which side of 1 a layer is on in training."""

from types import SimpleNamespace

import pytest
import torch

from te_inductor.patterns import size_rule
from te_inductor.recipes import Float8CurrentScaling


@pytest.fixture
def refusal(monkeypatch):
    """Of layers of one input, on a device of a given compute capability."""

    def ask(*sizes, capability=(9, 0), device="cuda"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(size_rule, "value", lambda _: SimpleNamespace(device=torch.device(device)))
        sites = [SimpleNamespace(sizes=size, weight=None, gemms=lambda: "fprop dgrad wgrad".split()) for size in sizes]
        return size_rule.refusal(sites, Float8CurrentScaling())

    return ask


@pytest.mark.parametrize(
    ("n", "k", "pays"),
    [
        (4096, 4096, True),
        (1000, 4096, True),
        (2048, 2048, True),
        (1024, 1024, False),
        (512, 512, False),
        (40, 4096, False),
    ],
)
def test_the_measured_layers(refusal, n, k, pays):
    reason = refusal((8192, n, k))
    assert (reason is None) == pays
    assert pays or f"M=8192, N={n}, K={k}" in str(reason)


def test_layers_of_one_input_are_weighed_together(refusal):
    one, small = (4096, 4096, 4096), (4096, 1024, 4096)
    assert refusal(small) is not None and refusal(one, small, small) is None


def test_where_nothing_is_known_nothing_is_refused(refusal):
    assert refusal((8192, 512, 512), capability=(8, 9)) is None
    assert refusal((8192, 512, 512), device="cpu") is None
    assert refusal(("s0", 512, 512)) is None
