"""Models whose weights FSDP2 gathers in FP8, and how ranks train them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from te_inductor import errors
from te_inductor.distributed import low_precision_all_gather
from te_inductor.recipes import DelayedScaling, Float8BlockScaling
from tests import ranks

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": "current",
    "block": Float8BlockScaling(),
}
K, N = 256, 384


class Block(nn.Module):
    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(K), nn.Linear(K, n), nn.Linear(n, K, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Skipping(nn.Module):
    """Calls its second block in odd steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.step = nn.ModuleList((Block(), Block())), 0

    def forward(self, x):
        self.step += 1
        for block in self.blocks[: 1 + self.step % 2]:
            x = block(x)
        return x


class Rank(ranks.Rank):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.replica = self.rank  # whose data it has

    def patches(self) -> list[Any]:
        return [torch._dynamo.config.patch(recompile_limit=1000)]  # models of one class, by several recipes

    def sharded(self, low: Any = None, model: nn.Module | None = None, **how: Any) -> nn.Module:
        """A model of two blocks; its weights gathered by the recipe `low`."""
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block()) if model is None else model
        how = {"mesh": self.mesh} | how
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block, **how)
        fully_shard(model, **how)
        return model if low is None else low_precision_all_gather(model, low, fallback="error")

    def compiled(self, model: nn.Module, recipe: Any, whole: bool = False) -> Any:
        how: Any = {"backend": "te", "options": {"recipe": recipe, "fallback": "error"}}
        if whole:
            return torch.compile(model, **how)
        for block in model.modules():
            if isinstance(block, Block):
                block.compile(fullgraph=True, **how)
        return model

    def train(self, model: nn.Module, run: Any, steps: int = 4, batches: int = 1, change: Any = None) -> Any:
        """Losses, and the parameters behind it; `change` is called with the model before each step."""
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.02)
        losses = []
        for step in range(steps):
            if change is not None:
                with torch.no_grad():
                    change(model, step)
            for batch in range(batches):
                model.set_requires_gradient_sync(batch == batches - 1)
                torch.manual_seed(100 * step + 10 * batch + self.replica)
                loss = run(torch.randn(32, K)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [whole(p) for p in model.parameters()]

    def equal(self, recipe: Any, make: Any = None, compiled: str = "blocks", change: Any = None, **how: Any) -> bool:
        """Whether training with what is gathered in low precision is the same."""
        found = []
        batches = how.pop("batches", 1)
        for low in (None, recipe):
            torch.manual_seed(0)
            model = self.sharded(low, None if make is None else make(), **how)
            found.append(self.train(model, self.compiled(model, recipe, compiled == "whole"), 4, batches, change))
        return same(*found)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def same(a: Any, b: Any) -> bool:
    """NaN included."""
    return str(a[0]) == str(b[0]) and all(
        torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(a[1], b[1], strict=True)
    )


def refused(function: Callable[[], Any]) -> str:
    """The text of the error, or of what was said."""
    try:
        function()
    except errors.TEInductorError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_a_recipe(function: Callable[[Rank, Any], Any]) -> Callable[[Rank, str], Any]:
    """A case that is given the recipe's name."""
    return functools.wraps(function)(lambda rank, name: function(rank, RECIPES[name]))
