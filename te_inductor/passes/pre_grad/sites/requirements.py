"""What a site must be to run in low precision. Each check returns None or the reason why not."""

from typing import Any

import torch

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.recipes import Recipe, Slots
from te_inductor.recipes.formats import LONGEST, padded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Padding N and K to 16 may multiply a GEMM's work by this much: midway between a win and a loss, measured on an H200
# (benchmarks/padding.py, docs/performance.md, 2026-11-20). Padded by 1.12, forward and backward take 0.88 of bf16's
# time, padded by 1.20, 1.8 of it.
MAX_PADDING = 1.16


def tensors(x: torch.Tensor, weight: torch.Tensor) -> Refusal | None:
    for name, tensor in (("input", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            return Refusal(
                "%s dtype %s is not float32, bfloat16 or float16", name, str(tensor.dtype).removeprefix("torch.")
            )
        wrapped = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
        if tensor.layout != torch.strided or (wrapped and not isinstance(tensor, GatheredWeight)):
            return Refusal("%s is a %s, not a plain strided tensor", name, type(tensor).__name__)
    return targets.of(weight.device).refusal


def sizes(n: Any, k: Any) -> Refusal | None:
    if not (isinstance(n, int) and isinstance(k, int)):
        return Refusal("weight of symbolic size %s x %s", n, k)
    if n == 0 or k == 0:
        return Refusal("empty weight %d x %d", n, k)
    work = padded(n) * padded(k) / (n * k)
    if work > MAX_PADDING:
        return Refusal("N=%d, K=%d would be padded to multiples of 16: %.2fx the work", n, k, work)
    return too_long(n, k)


def too_long(n: int, k: int) -> Refusal | None:
    """Whether kernels count to the end of a weight's rows and columns."""
    return Refusal("weight of %d x %d, longer than %d", n, k, LONGEST) if max(n, k) > LONGEST else None


def bias(bias: torch.Tensor | None, n: int, experts: int | None = None) -> Refusal | None:
    """`addmm` adds whatever can be expanded to the product, and so does `F.linear`, which calls it. Of `experts` each has
    a bias."""
    if bias is None or bias.shape == ((n,) if experts is None else (experts, n)):
        return None
    return Refusal("adds a tensor of shape %s, not a bias of N elements", tuple(bias.shape))


def blocks(slots: Slots, weight: torch.Tensor, n: int, k: int) -> Refusal | None:
    """What scales of blocks ask for beyond the checks above."""
    if not slots.fprop.blocked or _is_emulated(slots, weight.device):
        return None
    target = targets.of(weight.device)
    takes = slots.fprop.microscaled or targets.Ability.BLOCK_SCALES in target.can
    if not takes and target.capability is not None:
        return Refusal(
            "scales of blocks want compute capability 9.0 and CUDA 12.9, here are %d.%d and %s",
            *target.capability,
            target.cuda,
        )
    return block_sizes(slots, n, k)


def block_sizes(slots: Slots, n: int, k: int) -> Refusal | None:
    """Whether N and K fill the blocks well enough."""
    alignment = slots.input.granularity.alignment
    work = (padded(n) * padded(k, alignment) + padded(n, alignment) * padded(k)) / (2 * n * k)  # fprop and dgrad
    if work > MAX_PADDING:
        return Refusal("N=%d, K=%d would be padded to multiples of %d: %.2fx the work", n, k, alignment, work)
    return None


def not_stored(recipe: Recipe, weight: torch.Tensor, form: str, plain: bool) -> Refusal | None:
    """Refuses a recipe for stored weights, of a weight that is not and does not learn either."""
    if not weight.requires_grad:
        return Refusal(
            "weight is a plain %s tensor, which does not learn; te_inductor.quantize_(model, %r) stores it first",
            str(weight.dtype).removeprefix("torch."),
            recipe.name,
        )
    if form != "linear" or not plain or weight.dim() != 2:
        return Refusal("a %s, where F.linear alone trains with a weight that quantize_ is going to store", form)
    return None


def _is_emulated(slots: Slots, device: torch.device) -> bool:
    return slots.fprop.microscaled and not targets.of(device).multiplies(slots.fprop)


def emulated(slots: Slots, device: torch.device) -> Refusal | None:
    """Why a site multiplies what its low-precision operands stand for; None where the operands themselves are
    multiplied."""
    found = [one for one in slots.all() if _is_emulated(one, device)]
    if not found:
        return None
    dtype = "bfloat16" if targets.of(device).is_gpu else "float32"
    gemms = [gemm for one in found for gemm in (one.fprop, one.wgrad) if not gemm.is_high]
    elements = ", ".join(sorted({element for gemm in gemms for element in gemm.elements}))
    scopes = ", ".join(sorted({scope for gemm in gemms for scope in gemm.scopes}))
    return Refusal(
        "no tensor cores for %s with scales of %s on %s: exact values, multiplied in %s, no faster than high precision",
        *(elements, scopes, targets.of(device).name, dtype),
    )
