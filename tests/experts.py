"""Mixtures of experts as models write them, and the eager reference of each: the same layers by `grouped_linears`.

Without code generation a compiled model computes the reference bit for bit."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (its op; torch 2.11 traces no import of a lazy module)
from torch import Tensor, nn

from te_inductor import ops, recipes
from te_inductor.ops.layers.delayed_scales import FirstStep
from te_inductor.recipes import DelayedScaling, Recipe
from tests.support.layers import grouped_linears

EXPERTS, EACH, HIDDEN, INNER, TOKENS = 4, 2, 32, 48, 24

# From a parameter to the (E, K, N) that a product takes, and whether the parameter is (E, N, K).
FORMS: dict[str, tuple[Any, bool]] = {
    "transpose": (lambda w: w.transpose(-2, -1), True),
    "mT": (lambda w: w.mT, True),
    "permute": (lambda w: w.permute(0, 2, 1), True),
    "direct": (lambda w: w, False),
    "cast": (lambda w: w.bfloat16().transpose(1, 2), True),
    "cast behind": (lambda w: w.transpose(-1, -2).to(torch.bfloat16), True),
}


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """torch's, which is for bf16 where code is compiled; else the op that transformers has for that."""
    if w.dtype == torch.bfloat16 and w.shape[1] % 8 == w.shape[2] % 8 == 0:  # else torch refuses
        return F.grouped_mm(x.to(w.dtype), w, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs=ends)  # type: ignore[no-any-return]


def _titan(x: Tensor, order: Tensor) -> Tensor:
    rows = (order // EACH).reshape(-1, 1).expand(-1, x.shape[1])
    return torch.gather(x, dim=0, index=rows)


def _in_place(x: Tensor, order: Tensor) -> Tensor:
    chosen = x[order // EACH]
    chosen.masked_fill_(torch.arange(len(order), device=x.device)[:, None] % 5 == 0, 0.5)
    return chosen


def _written(x: Tensor, order: Tensor) -> Tensor:
    """The table is written behind the gather."""
    table = x * 1.0
    chosen = table[order // EACH]
    table.add_(1.0)
    return chosen


# What experts read of x (T, K), in the order of experts; those that are one with the product, and others.
FOLDED = {
    "getitem": lambda x, order: x[order // EACH],
    "cast": lambda x, order: x[order // EACH].to(x.dtype),
    "floor": lambda x, order: x[torch.div(order, EACH, rounding_mode="floor")],
    "index_select": lambda x, order: torch.index_select(x, 0, order // EACH),
    "method": lambda x, order: x.index_select(dim=0, index=order.floor_divide(EACH)),
    "torchtitan": _titan,
    "unsqueezed": lambda x, order: x.gather(0, (order // EACH)[:, None].expand_as(x[order // EACH])),
}
BARE = {
    "scaled": lambda x, order: x[order // EACH] * 0.5,
    "in place": _in_place,
    "table written": _written,
    "repeated": lambda x, order: x.repeat_interleave(EACH, 0)[order],
    "not the order": lambda x, order: x[(order // EACH).flip(0)],
    "column of another order": lambda x, order: x.gather(
        0, (order // EACH)[torch.arange(len(order)).flip(0), None].expand(-1, x.shape[1])
    ),
    "elements": lambda x, order: x.gather(0, (order // EACH)[:, None] * torch.ones_like(x[:1], dtype=torch.int64)),
}


class Experts(nn.Module):
    """gate and up as one parameter or as two calls, and down."""

    def __init__(
        self,
        form: str = "transpose",
        split: bool = False,
        inner: int = INNER,
        experts: int = EXPERTS,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.form, self.split = form, split

        def made(n: int, k: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(experts, *((n, k) if FORMS[form][1] else (k, n))) / k**0.5)

        if split:
            self.w1, self.w3 = made(inner, hidden), made(inner, hidden)
        else:
            self.gate_up_proj = made(2 * inner, hidden)
        self.down_proj = made(hidden, inner)

    def product(self, x: Tensor, weights: list[Tensor], ends: Tensor) -> list[Tensor]:
        return [grouped_mm(x, FORMS[self.form][0](w), ends) for w in weights]

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.split:
            gate, up = self.product(x, [self.w1, self.w3], ends)
        else:
            gate, up = self.product(x, [self.gate_up_proj], ends)[0].chunk(2, -1)
        return self.product(F.silu(gate) * up, [self.down_proj], ends)[0]


class MoE(nn.Module):
    """A router, experts, and the sum of what a token's experts say; some rows may belong to no expert."""

    def __init__(self, pick: str = "getitem", form: str = "transpose", split: bool = False, **more: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(more.get("hidden", HIDDEN), more.get("experts", EXPERTS), bias=False)
        self.experts = Experts(form, split, **more)
        self.pick, self.dropped = pick, 0

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).softmax(-1).topk(EACH, dim=-1)
        ids, order = torch.sort(ids.flatten())
        counts = torch.histc(ids.float(), bins=len(self.gate.weight), min=0, max=len(self.gate.weight) - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        if self.dropped:
            ends = ends.clamp(max=len(order) - self.dropped)
        y = self.experts((FOLDED | BARE)[self.pick](x, order), ends)
        y = y * scores.flatten()[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return y[back].view(-1, EACH, x.shape[1]).sum(1)


class _Reference(Experts):
    """Products that are low already; gathered rows have the scales that rows have before the gather."""

    recipe: Recipe

    def product(self, x: Tensor, weights: list[Tensor], ends: Tensor) -> list[Tensor]:
        weights = [w if FORMS[self.form][1] else w.transpose(1, 2) for w in weights]
        slots = self.recipe.slots()
        x = ops.mask_rows(x.bfloat16() if self.form.startswith("cast") else x, ends)
        if isinstance(self.recipe, DelayedScaling):  # a first step
            amax = torch.zeros(())
            spec = ops.LayerSpec(slots, FirstStep(self.recipe))
            return ops.layers(x, weights, [], spec, x.dtype, ends=ends, grad_amax=amax)  # type: ignore[no-any-return]
        if slots.weight.granularity.whole:
            return grouped_linears(x, weights, [], ends, slots, x.dtype)  # type: ignore[no-any-return]
        return [grouped_linears(x, [w], [], ends, slots, x.dtype)[0] for w in weights]


def reference(model: nn.Module, recipe: str | Recipe) -> nn.Module:
    """A copy of a model of these experts in which they run eagerly in low precision."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is Experts:
            module.__class__ = _Reference
            module.recipe = recipes.resolve(recipe)  # type: ignore[assignment]
    return twin


class FixedExperts(nn.Module):
    """Experts whose choice hangs on no values, so that roundings change none; `low` is the recipe of the reference."""

    def __init__(self, width: int, size: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, size, width) / width**0.5)
        self.low: Recipe | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat, experts = x.reshape(-1, x.shape[-1]), self.weight.shape[0]
        ids = torch.arange(EACH * flat.shape[0], device=x.device) * 5 // 3 % experts
        order = torch.argsort(ids, stable=True)
        ends = (ids[:, None] == torch.arange(experts, device=x.device)).sum(0).cumsum(0).int()
        rows, dtype = order // EACH, self.weight.dtype
        # The layer adds up a row's gradients before it rounds them to what x was cast from.
        y = self.product(flat[rows].to(dtype) if self.low is None else flat.to(dtype)[rows], ends)
        return y[torch.argsort(order)].view(-1, EACH, y.shape[1]).sum(1).view(*x.shape[:-1], y.shape[1])

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.low is None:
            return grouped_mm(x, self.weight.transpose(1, 2), ends)
        given = (ops.mask_rows(x, ends), [self.weight], [], ends, self.low.slots_of(""), x.dtype)
        if isinstance(self.low, DelayedScaling):
            x, weights, biases, ends, slots, dtype = given
            spec = ops.LayerSpec(slots, FirstStep(self.low))
            return ops.layers(x, weights, biases, spec, dtype, ends=ends, grad_amax=torch.zeros(()))[0]  # type: ignore[no-any-return]
        return grouped_linears(*given)[0]  # type: ignore[no-any-return]
