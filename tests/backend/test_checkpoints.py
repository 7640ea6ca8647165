"""Activation checkpointing, full and selective, hooks on saved tensors and offloading them, under every recipe: the
same results bit for bit; what is computed again, and what is kept."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.backend.test_autograd import DIM, X, results, same, te
from tests.numerics.test_linear import Calls
from tests.recipes import NAMES, every_recipe, every_stateless_recipe

pytestmark = pytest.mark.usefixtures("without_codegen")
QUICK = ("current", "block", "delayed")  # each case compiles six programs

aten = torch.ops.aten


class Blocks(nn.Module):
    """Two blocks of two layers, each block called by `wrap`."""

    def __init__(self, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM, bias=bias), nn.GELU(), nn.Linear(DIM, DIM, bias=bias)) for _ in range(2)
        )
        self.wrap = lambda block, x: block(x)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.wrap(block, x)
        return x

    def wrapped(self, **options):
        twin = copy.deepcopy(self)
        twin.wrap = partial(checkpoint, use_reentrant=False, **options)
        return twin


def selective(policy):
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def names_the_product(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if op in (aten.mm.default, aten.addmm.default) else CheckpointPolicy.PREFER_RECOMPUTE
    )


def names_it_and_forbids_the_rest(ctx, op, *args, **kwargs):
    save = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE


def names_ours(ctx, op, *args, **kwargs):
    save = op is torch.ops.te_inductor.scaled_mm.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def refuses_ours(ctx, op, *args, **kwargs):
    if op is torch.ops.te_inductor.scaled_mm.default:
        return CheckpointPolicy.MUST_RECOMPUTE
    return names_the_product(ctx, op, *args, **kwargs)


def products(run, model, x) -> tuple[list[torch.Tensor], Counter]:
    """Results, and how often each GEMM ran in the backward."""
    torch.manual_seed(0)
    y = run(x)
    with Calls(of=lambda op, args: args[5].name if op == "scaled_mm" else None) as calls:
        gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y.detach(), *gradients], Counter(calls.names)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_is_computed_again(name, bias):
    """A policy that names aten.mm or aten.addmm saves products in low precision as in high; so does the op's own
    name."""
    model, x = Blocks(bias), torch.randn(X, requires_grad=True)
    expected, calls = products(te(model_ := copy.deepcopy(model), name), model_, x)
    assert calls == {"dgrad": 4, "wgrad": 4}
    for options, again in (
        ({}, True),
        (selective(names_the_product), False),
        (selective(names_it_and_forbids_the_rest), False),
        (selective([aten.mm.default, aten.addmm.default]), False),
        (selective(names_ours), False),
        (selective(refuses_ours), True),
    ):
        wrapped = model.wrapped(**options)
        found, calls = products(te(wrapped, name), wrapped, x)
        assert same(found, expected)
        assert bool(calls.pop("fprop", 0)) == again and calls == {"dgrad": 4, "wgrad": 4}


@every_stateless_recipe
def test_a_policy_that_counts(name):
    """Every second product is saved, as torchtitan does it; and it sees the operands that stood there."""
    seen = []

    def contexts():
        count = 0

        def every_second(ctx, op, *args, **kwargs):
            nonlocal count
            if op is not aten.mm.default:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen.append([tuple(arg.shape) for arg in args])
            count += 1
            return CheckpointPolicy.MUST_SAVE if count % 2 else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(every_second)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(DIM, 2 * DIM, bias=False),
                nn.GELU(),
                nn.Linear(2 * DIM, DIM, bias=False),
                nn.GELU(),
                nn.Linear(DIM, DIM),
            )

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False, context_fn=contexts)

    model, x = Wide(), torch.randn(X, requires_grad=True)
    _, calls = products(te(model, name), model, x)
    assert set(map(tuple, seen)) == {((32, DIM), (DIM, 2 * DIM)), ((32, 2 * DIM), (2 * DIM, DIM))}
    assert calls["fprop"] == 1  # the second; the first was saved, and nobody reads the last


def test_where_nothing_is_low_a_policy_is_as_it_was():
    model, x = Blocks(), torch.randn(X, requires_grad=True)
    wrapped = model.wrapped(**selective(names_the_product))
    found = results(te(wrapped, "none"), list(wrapped.parameters()), x)
    assert all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(found, results(model, list(model.parameters()), x), strict=True)
    )


# Saved tensors.


@every_stateless_recipe
def test_hooks_on_saved_tensors(name):
    """Around the compiled function; what they are given are the low-precision copies, whatever their dtype."""
    model, x = Blocks(), torch.randn(X, requires_grad=True)
    expected = results(te(model, name), list(model.parameters()), x)
    dtypes = set()

    def pack(tensor):
        dtypes.add(tensor.dtype)
        return tensor.clone(), tensor.device

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
        y = te(model, name)(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    assert same([y.detach(), *gradients], expected)
    assert any(dtype.itemsize == 1 for dtype in dtypes)


@every_recipe
def test_offloading_saved_tensors(name):
    """torch.autograd.graph.save_on_cpu, around a compiled function and around one with a checkpoint in it."""
    model, x = Blocks(), torch.randn(X, requires_grad=True)
    expected = results(te(copy.deepcopy(model), name), [], x)
    for twin in (copy.deepcopy(model), model.wrapped()):
        run = te(twin, name)
        torch.manual_seed(0)
        with torch.autograd.graph.save_on_cpu():
            y = run(x)
        [gradient] = torch.autograd.grad(y.square().sum(), [x])
        assert same([y.detach(), gradient], expected)
