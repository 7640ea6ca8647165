"""A small Llama for the command, as a factory of your own would return it:

te-inductor explain examples.factory:llama
te-inductor explain examples.factory:llama --set dim=4096 --set tokens=2048 --set device=meta --target h100
te-inductor bench examples.factory:llama --recipes current delayed --set layers=2
te-inductor report examples.factory:llama --recipe mxfp8 --png accuracy.png
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.llama import Llama, LlamaConfig


def llama(
    layers: int = 4, dim: int = 128, tokens: int = 64, device: str | None = None
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A model of random weights, one batch of random tokens (4, tokens), and the loss of its output."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(vocab=256, dim=dim, layers=layers, heads=4, hidden=3 * dim, context=tokens)
    given = torch.randint(256, (4, tokens + 1), device=device)

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten())

    with torch.device(device):
        return Llama(config), given[:, :-1], loss
