"""How far a first step under delayed scaling is from high precision."""

from torch import nn


class Residual(nn.Module):
    """Deep enough that gradients which vanish in one layer are missing in those below."""

    def __init__(self, width=64, layers=2, wrap=None):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.wrap = wrap or (lambda block, x: block(x))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.wrap(lambda y, up=up, down=down: down(nn.functional.silu(up(y))), x)
        return x


def errors(found, expected):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
