"""Runs the kernels of experts' stored weights in Triton's interpreter and compares:

TRITON_INTERPRET=1 python -m tests.offline.experts_kernels
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from te_inductor.kernels.experts_decode import ExpertsConfig, scales_as
from te_inductor.ops import stored_experts
from te_inductor.recipes import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, NVFP4WeightOnly, Recipe
from te_inductor.runtime.eager import experts
from te_inductor.templates.triton import experts_decode, nvfp4_expand
from tests.offline.interpret import mend_interpreter

SMALL = ExpertsConfig(rows=16, block_k=64, stages=2)
# Rows of each expert, rows of none behind them, N, K, how the work is cut.
CASES = [
    ([0, 3, 0, 17, 1, 0], 2, 70, 128, SMALL),  # a tile and one row; experts without rows; N of no whole tile
    ([5], 0, 64, 80, SMALL),  # one expert; K of no whole tile
    ([0, 0, 16, 0], 0, 20, 256, ExpertsConfig(16, 128, 2)),  # one expert has all
    ([1, 2, 3], 4, 30, 50, ExpertsConfig(32, 128, 2)),  # K of no whole block
]
RECIPES = [NVFP4WeightOnly(), Float8RowwiseScaling(), Float8CurrentScaling(), Float8BlockScaling()]


def check(sizes: list[int], behind: int, n: int, k: int, config: ExpertsConfig, recipe: object) -> None:
    """Products are exact in fp32 (of bf16, with 8 significant bits, and at most 6 of a weight), K of them are summed
    there; scales are roundings of their own."""
    count, m = len(sizes), sum(sizes) + behind
    weight = stored_experts.store(torch.randn(count, n, k) * torch.rand(count, 1, 1), recipe, False)  # type: ignore[arg-type]
    x = torch.randn(m, k).bfloat16()
    x[m - behind :] = torch.nan
    ends = torch.tensor(sizes).cumsum(0).int()
    wide = weight.dequantize().double()
    ids = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    each, found = wide[ids], x[: len(ids)]
    exact = torch.einsum("mk,mnk->mn", found.double(), each)
    bound = (k + 4) * 2.0**-24 * torch.einsum("mk,mnk->mn", found.double().abs(), each.abs())
    y = product(weight, x, ends, None, config)
    assert (y[m - behind :] == 0).all()
    assert ((y[: len(ids)].double() - exact).abs() <= bound).all(), (sizes, recipe)
    order = torch.randperm(len(ids))
    numbers = ids[order]
    numbers[::2] -= count  # from the end
    y = product(weight, found[order].t().contiguous().t(), None, numbers, config)
    assert ((y.double() - exact[order]).abs() <= bound[order]).all(), (sizes, recipe)


def product(
    weight: stored_experts.StoredExperts, x: Tensor, ends: Tensor | None, ids: Tensor | None, config: ExpertsConfig
) -> Tensor:
    rest = {"out_dtype": torch.float32, "assembly": False, "config": config}
    if isinstance(weight, stored_experts.NVFP4Experts):
        return experts_decode.nvfp4_product(x, ends, ids, *weight.parts, **rest)  # type: ignore[arg-type]
    quantizer = weight.recipe.slots().weight
    assert scales_as(quantizer.format, quantizer.granularity)
    if quantizer.granularity.blocked:
        rest["config"] = ExpertsConfig(config.rows, 128, config.stages)
    return experts_decode.fp8_product(x, ends, ids, *weight.parts, quantizer, **rest)  # type: ignore[arg-type]


@contextlib.contextmanager
def not_read(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """No load of a kernel may touch the memory of these; how many elements each load reads elsewhere."""
    ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()]
    load, seen = InterpreterBuilder.create_masked_load, []

    def checked(self: InterpreterBuilder, ptrs: Any, mask: Any, *rest: Any) -> Any:
        addresses = np.asarray(ptrs.data)[np.asarray(mask.data, dtype=bool)]
        for begin, end in ranges:
            assert not ((addresses >= begin) & (addresses < end)).any(), "an expert was read that nobody chose"
        seen.append(addresses.size)
        return load(self, ptrs, mask, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", checked):
        yield seen


def chosen_alone(batch: int, recipe: Recipe) -> None:
    """A step of generation reads the weights of the experts that were chosen, and no others: those are NaN besides."""
    count, n, k, each = 16, 24, 64, 2
    weight = stored_experts.store(torch.randn(count, n, k), recipe, False)
    choosable = torch.randperm(count)[: count // 2 if batch > 1 else each]
    ids = torch.stack([choosable[torch.randperm(len(choosable))[:each]] for _ in range(batch)]).flatten()
    wide, x = weight.dequantize().double(), torch.randn(len(ids), k).bfloat16()
    parts = [part for part in weight.parts if part.dim() and part.shape[0] == count]
    others = [part[expert] for expert in set(range(count)) - set(ids.tolist()) for part in parts]
    for part in others:
        part.view(-1).view(torch.uint8).fill_(0xFF)  # NaN of fp32 and of E4M3
    exact = torch.einsum("mk,mnk->mn", x.double(), wide[ids])
    bound = (k + 4) * 2.0**-24 * torch.einsum("mk,mnk->mn", x.double().abs(), wide[ids].abs())
    order, ends = experts.sorted_by_expert(ids, count)
    with not_read(others) as seen:
        by_number = product(weight, x, None, ids, SMALL)
        by_group = product(weight, x[order], ends, None, SMALL)
    assert sum(seen) and ((by_number.double() - exact).abs() <= bound).all()
    assert ((by_group.double() - exact[order]).abs() <= bound[order]).all()


def dequantized() -> None:
    """All experts at once, bit for bit."""
    weight = stored_experts.store(torch.randn(3, 11, 50), NVFP4WeightOnly(), False)
    found = nvfp4_expand.dequantize(*weight.parts, 50, torch.bfloat16, assembly=False)
    assert torch.equal(found, experts.nvfp4_dequantize(*weight.parts, 50, torch.bfloat16))


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    for place, case in enumerate(CASES):
        for recipe in RECIPES if place == 0 else RECIPES[:2]:
            check(*case, recipe)
    for batch in (1, 8):
        for recipe in RECIPES[:2]:
            chosen_alone(batch, recipe)
    dequantized()
