"""Experts as other libraries train them, in the place of a transformers layer's: for benchmarks.experts.

Both want groups padded by their caller: to multiples of 16 rows, torchao's at least 16. That is done here on the device,
by one gather into `M + 16 E` rows. torchao's experts are compiled around its autograd function; its scales are powers
of two. TransformerEngine's GroupedLinear takes sizes of groups as numbers, which the host waits for, and runs eagerly."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 16  # rows of a group, of FP8 wgrad's contraction
Product = Callable[[Tensor, str, Tensor], Tensor]  # of rows, the parameter's name, and where each group ends


def padded_places(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds where each choice's row stands among padded groups, (M,) int64, and where each group ends, (E,) int32."""
    order = torch.argsort(experts, stable=True)
    sizes = torch.zeros(count, dtype=torch.int64, device=experts.device)
    sizes = sizes.scatter_add(0, experts, torch.ones_like(experts))
    padded = ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp(min=ALIGNMENT)
    ends = padded.cumsum(0)
    shift = (ends - padded) - (sizes.cumsum(0) - sizes)  # of a group: rows of padding in front of it
    chosen = experts[order]
    sorted_places = torch.arange(len(order), device=experts.device) + shift[chosen]
    return torch.zeros_like(order).scatter(0, order, sorted_places), ends.int()


class PaddedExperts(nn.Module):
    """The experts of a transformers layer, gate and up in one parameter, with products of somebody else's."""

    def __init__(self, experts: nn.Module, product: Product) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.product = product

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        count, each = self.gate_up_proj.shape[0], chosen.shape[-1]
        places, ends = padded_places(chosen.flatten(), count)
        # At most, whatever the sizes are; a row of wgrad's operands, which is a multiple of 16 bytes.
        width = -(-len(places) // ALIGNMENT) * ALIGNMENT + ALIGNMENT * count
        source = torch.full((width,), -1, device=x.device, dtype=torch.int64)
        source = source.scatter(0, places, torch.arange(len(places), device=x.device) // each)
        rows = torch.where((source >= 0)[:, None], x[source.clamp(min=0)], torch.zeros((), dtype=x.dtype))
        gate, up = self.product(rows, "gate_up_proj", ends).chunk(2, -1)
        y = self.product(F.silu(gate) * up, "down_proj", ends)[places]
        return (y.view(-1, each, y.shape[1]) * scores.unsqueeze(-1)).sum(1).to(x.dtype)


def torchao(model: nn.Module) -> Callable[[Tensor], Any]:
    """FP8 with scales of rows (torchao 0.18, prototype)."""
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

    experts = model.experts

    def product(rows: Tensor, name: str, ends: Tensor) -> Tensor:
        weight = getattr(experts, name).transpose(-2, -1)
        return multiply(rows, weight, ends, pad_token_groups_for_grouped_mm=False)  # type: ignore[no-any-return]

    model.experts = PaddedExperts(experts, product)
    return torch.compile(model)


def te_module(model: nn.Module, recipe: str = "current") -> Callable[[Tensor], Any]:
    """TransformerEngine's GroupedLinear, with weights of its own."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    chosen = {"current": recipes.Float8CurrentScaling, "block": recipes.Float8BlockScaling}[recipe]()
    like, layers = model.experts.gate_up_proj, {}
    for name in ("gate_up_proj", "down_proj"):
        count, n, k = getattr(model.experts, name).shape
        layers[name] = te.GroupedLinear(count, k, n, bias=False, params_dtype=like.dtype, device=like.device)

    def product(rows: Tensor, name: str, ends: Tensor) -> Tensor:
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        sizes[-1] += len(rows) - sum(sizes)  # the rows behind all groups, which hold zeros
        with te.autocast(enabled=True, recipe=chosen):
            return layers[name](rows, sizes)  # type: ignore[no-any-return]

    model.experts = PaddedExperts(model.experts, product)
    model.experts.layers = nn.ModuleDict(layers)
    return model


PEERS: dict[str, Callable[[nn.Module], Callable[[Tensor], Any]]] = {"torchao": torchao, "te_module": te_module}
OWN_WEIGHTS = ("te_module",)  # whose results are not the other arms'
