"""Factories for the command's tests."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu


def pair(layers=2, width=64):
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(32, width)


def wide(device="cpu"):
    with torch.device(device):
        layers = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096))
        return layers.bfloat16(), torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((128, 512), (128, 512), (512, 128))
        )

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def gated():
    return Gated(), torch.randn(4096, 128)


def with_loss():
    target = torch.randint(0, 16, (32,))
    return nn.Linear(64, 16), [torch.randn(32, 64)], lambda y: cross_entropy(y.float(), target)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x, scale):
        return self.layer(x) * scale


def keywords():
    return {"model": Keywords().eval(), "inputs": {"x": torch.randn(8, 32)}, "kwargs": {"scale": 2.0}}


def fails_on_its_way():
    raise ValueError("no data today")


def nothing():
    return 7


model = nn.Linear(4, 4)
