"""Training under fp16 autocast with a GradScaler: which steps it skips."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 200
OCTAVES = 40  # of loss scales that may overflow or not


def _backward(forward: Callable[[Tensor], Tensor], x: Tensor, factor: float, scale: Callable[[Tensor], Tensor]) -> None:
    with torch.autocast(x.device.type, torch.float16):
        loss = forward(x).float().square().sum() * factor
    scale(loss).backward()


def first_to_overflow(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> float:
    """The smallest factor of the loss, within 2%, with which a gradient is not finite."""
    low, high = -OCTAVES / 2, OCTAVES / 2
    while high - low > 0.03:
        middle = (low + high) / 2
        module.zero_grad()
        _backward(forward, x, 2.0**middle, lambda loss: loss)
        finite = all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)
        low, high = (middle, high) if finite else (low, middle)
    return float(2.0**high)


def scales(module: nn.Module, x: Tensor, unit: float, backend: str, options: Any = None) -> list[float]:
    """The loss scales of a GradScaler over 200 steps on one batch, in every fifth of which the loss is 64 times as
    large. With `unit` the first factor that overflows in high precision, scales lie half an octave from it, so that no
    error of a recipe decides whether one does."""
    forward = torch.compile(module, backend=backend, options=options, fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**17, growth_interval=5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = unit * 2.0**-10.5 * (64 if step % 5 == 3 else 1)
        _backward(forward, x, factor, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def of_high_precision(module: nn.Module, x: Tensor) -> tuple[float, list[float]]:
    """The first factor that overflows under plain torch.compile, and the loss scales there."""
    unit = first_to_overflow(torch.compile(module, backend="inductor", fullgraph=True), module, x)
    found = scales(module, x, unit, "inductor")
    assert sum(after < before for before, after in itertools.pairwise(found)) > STEPS // 10
    return unit, found
