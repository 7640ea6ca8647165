"""What models of several subjects are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import ops

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


SMALL = {"policy": {"*": "rowwise"}}  # named by the policy, a site may be too small to pay


EACH = {"weights": "each_call"}  # in graphs whose casts of weights are looked at


class Mlp(nn.Module):
    """RMSNorm, gate and up, SwiGLU, down: every producer that a quantization meets in a transformer."""

    def __init__(self, dim: int, hidden: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        made = {"bias": bias, "device": "cuda", "dtype": dtype}
        self.norm = nn.RMSNorm(dim, device="cuda", dtype=dtype)
        self.gate, self.up = nn.Linear(dim, hidden, **made), nn.Linear(dim, hidden, **made)
        self.down = nn.Linear(hidden, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def cast_both_ways(rows: int, columns: int, scope: str = "tensor", element: str = "e4m3") -> Case:
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        return ops.quantize_rowcol(x, Quantizer(element, scope=scope))

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return torch.compile(function, backend="te", fullgraph=True), (x,)
