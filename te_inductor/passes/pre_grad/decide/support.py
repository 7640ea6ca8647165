"""What a site must be to run in low precision. Each check returns None or the reason why not."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from te_inductor import compat, targets
from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.passes.graph.aliases import memory
from te_inductor.recipes import Recipe, Slots
from te_inductor.recipes.formats import LONGEST, padded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Padding N and K to 16 may multiply a GEMM's work by this much: midway between a win and a loss, measured on an H200
# (benchmarks/padding.py, docs/performance.md, 2026-11-20). Padded by 1.12, forward and backward take 0.88 of bf16's
# time, padded by 1.20, 1.8 of it.
MAX_PADDING = 1.16


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo traced for a node."""
    return node.meta["example_value"]  # type: ignore[no-any-return]


def is_gathered(weight: fx.Node) -> bool:
    """Whether FSDP2 gathered a weight, or a rank's part of it, in low precision."""
    return isinstance(compat.shard_of(value(weight)), GatheredWeight)


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def requires_grad(node: fx.Node) -> bool:
    """Whether any tensor that a node returns has a gradient."""
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in results)


def is_wrapped(node: fx.Node) -> bool:
    """Whether a transform of torch.func is around a call: outside of it nothing can be traced in the call's place."""
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return any(
        isinstance(one, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(one) for one in results
    )


@contextmanager
def as_traced(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """What Dynamo traced a call in that made this fake tensor of those: other calls in it take the call's place."""
    mixed = any(fake.is_floating_point() and fake.dtype != output.dtype for fake in inputs)
    autocast = torch.autocast(output.device.type, dtype=output.dtype, enabled=mixed)
    fake_mode: Any = output.fake_mode  # type: ignore[attr-defined]
    # Only Python's dispatcher takes symbolic sizes in `linear` of a frozen weight (torch 2.11).
    with enable_python_dispatcher(), fake_mode, torch.set_grad_enabled(output.requires_grad), autocast:
        yield


def lay_in(output: torch.Tensor, result: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Have `result`, which takes the place of a call that made `output`, and those of `nodes` that are views of it say
    that they lie in its memory: what Dynamo has traced behind the call are views of that."""
    place = memory(result)
    with output.fake_mode, torch.set_grad_enabled(output.requires_grad):  # type: ignore[attr-defined]
        for node in nodes:
            if is_tensor(node) and memory(node) & place:
                made = value(node)
                node.meta["example_value"] = output.as_strided(made.shape, made.stride(), made.storage_offset())


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


def sizes(m: Any, n: Any, k: Any) -> Refusal | None:
    if not (isinstance(n, int) and isinstance(k, int)):
        return Refusal("weight of symbolic size %s x %s", n, k)
    if isinstance(m, int) and m == 0:
        return Refusal("empty batch")
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
    if not slots.fprop.blocked or emulated(slots, weight.device):
        return None
    target = targets.of(weight.device)
    if not slots.fprop.microscaled and target.capability is not None and not target.block_scaled_mm:
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


def not_stored(recipe: Recipe, weight: torch.Tensor) -> Refusal:
    """Of a recipe for stored weights, and a weight that is not."""
    return Refusal(
        "weight is a plain %s tensor; te_inductor.quantize_(model, %r) stores it first",
        str(weight.dtype).removeprefix("torch."),
        recipe.name,
    )


def emulated(slots: Slots, device: torch.device) -> Refusal | None:
    """Why a site multiplies what its low-precision operands stand for; None where the operands themselves are
    multiplied."""
    if not slots.fprop.microscaled or targets.of(device).multiplies(slots.fprop):
        return None
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    gemms = (slots.fprop, slots.wgrad)
    elements = ", ".join(sorted({element for gemm in gemms for element in gemm.elements}))
    scopes = ", ".join(sorted({scope for gemm in gemms for scope in gemm.scopes}))
    return Refusal(
        "no tensor cores for %s with scales of %s on %s: exact values, multiplied in %s, no faster than high precision",
        *(elements, scopes, targets.of(device).name, dtype),
    )
