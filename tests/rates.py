"""A CPU that the size rule takes for a Hopper GPU."""

from typing import Any

from te_inductor import targets
from te_inductor.targets import sm90
from te_inductor.targets.target import Target

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def rated(monkeypatch: Any, product: str = H200) -> None:
    """Layers are compiled for the CPU as they were, and weighed by the rates of `product`."""
    target = Target("test", product=product, rates=(sm90.H200, sm90.OTHER))
    monkeypatch.setattr(targets, "of", lambda device: target)
    monkeypatch.setattr(targets, "product", lambda device: product)
