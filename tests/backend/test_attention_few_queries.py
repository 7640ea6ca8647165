"""Attention of the few queries of a step of generation: which calls are taken, and what they compute. Here the op runs its
eager form; tests/offline interprets the kernel, tests/gpu runs it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from te_inductor import ops, targets
from te_inductor.passes.pre_grad.attention import sites
from tests.attention import Passes

B, H, KV, M, N, D = 3, 8, 2, 1, 40, 64
TARGET = SimpleNamespace(can=targets.Ability.DECODE_ATTENTION, is_gpu=True, refusal=None)
sdpa = F.scaled_dot_product_attention


def repeated(x, groups=H // KV):
    """Repeats heads as transformers does it."""
    b, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(b, heads, groups, length, width).reshape(b, heads * groups, length, width)


def written(q, k, v, mask):
    """A cache whose last place this step fills."""
    place = torch.tensor([N - 1])
    k = k.clone().index_copy_(2, place, q[:, :KV])
    return sdpa(q, repeated(k), repeated(v), mask)


def written_later(q, k, v, mask):
    """What is repeated is a copy, which a later write of the cache does not reach."""
    k = k.clone()
    copy = repeated(k)
    k.zero_()
    return sdpa(q, copy, repeated(v), mask) + k.sum()


def turned(q, k, v, mask):
    """A cache of (B, N, KV, D)."""
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return sdpa(q, repeated(k), repeated(v), mask)


def under_autocast(q, k, v, mask):
    with torch.autocast("cpu", torch.bfloat16):
        return sdpa(q, k, v, mask, enable_gqa=True)


TAKEN = {
    "repeated": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask),
    "of all alike": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask[:1]),
    "of two dimensions": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask[0, 0]),
    "of heads and queries": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask[:1, 0]),
    "without a mask": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v)),
    "with a scale": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask, scale=0.3),
    "grouped": lambda q, k, v, mask: sdpa(q, k, v, mask, enable_gqa=True),
    "interleaved": lambda q, k, v, mask: sdpa(q, *(x.repeat_interleave(H // KV, 1) for x in (k, v)), mask),
    "a head each": lambda q, k, v, mask: sdpa(q[:, :KV], k, v, mask),
    "two queries": lambda q, k, v, mask: sdpa(torch.cat([q, -q], 2), repeated(k), repeated(v), mask),
    "hides all": lambda q, k, v, mask: sdpa(
        q, repeated(k), repeated(v), mask & (torch.arange(B) > 0)[:, None, None, None]
    ),
    "written": written,
    "written later": written_later,
    "turned": turned,
    "under autocast": under_autocast,
}
LEFT = {
    "causal": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), is_causal=True),
    "a mask of queries": lambda q, k, v, mask: sdpa(
        torch.cat([q, q], 2), repeated(k), repeated(v), torch.cat([mask, ~mask], 2)
    ),
    "a mask of heads": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask.repeat(1, H, 1, 1)),
    "numbers": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), torch.where(mask, 0, -torch.inf).bfloat16()),
    "too many queries": lambda q, k, v, mask: sdpa(q.repeat(1, 1, 3, 1), repeated(k), repeated(v), mask),
    "an odd width": lambda q, k, v, mask: sdpa(*(x[..., :40] for x in (q, repeated(k), repeated(v))), mask),
    "another width of v": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v)[..., :32], mask),
    "single precision": lambda q, k, v, mask: sdpa(*(x.float() for x in (q, repeated(k), repeated(v))), mask),
    "many heads, each its own": lambda q, k, v, mask: sdpa(
        *(x.repeat(4, 1, 1, 1) for x in (q, repeated(k) * 1, repeated(v) * 1)), mask.repeat(4, 1, 1, 1)
    ),
    "many heads without a mask": lambda q, k, v, mask: sdpa(
        *(x.repeat(12, 1, 1, 1) for x in (q, k, v)), enable_gqa=True
    ),
    "learned": lambda q, k, v, mask: sdpa(q, repeated(k), repeated(v), mask),
}


def operands(batch=B):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, *shape).bfloat16() for shape in ((H, M, D), (KV, N, D), (KV, N, D)))
    return q, k, v, torch.rand(batch, 1, 1, N) < 0.7


class Calls(Passes):
    """Keeps the shapes of the keys that the op reads."""

    def __call__(self, gm, inputs):
        run = super().__call__(gm, inputs)
        nodes = gm.graph.find_nodes(op="call_function", target=ops.decode_attention)
        self.keys = [tuple(node.args[1].meta["example_value"].shape) for node in nodes]
        return run


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(sites, "targets", SimpleNamespace(of=lambda device: TARGET))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    """It reads the keys of each head once. Scores, weights and sums stay in fp32, so that the output is within half an ulp
    of the exact one's, and of sums in fp32."""
    given, backend = operands(), Calls()
    with torch.no_grad():
        y = torch.compile(TAKEN[name], backend=backend)(*given)
        program = TAKEN["grouped" if name == "under autocast" else name]  # which casts float64, too
        expected = program(*(x.double() if x.is_floating_point() else x for x in given)).double()
    assert backend.keys == [(B, H if name == "written later" else KV, N, D)] and y.dtype is torch.bfloat16
    assert (y.double() - expected).abs().max() <= 2.0**-8 * expected.abs().max() + 1e-5


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    (q, *rest), backend = operands(), Calls()
    with torch.set_grad_enabled(name == "learned"):
        torch.compile(LEFT[name], backend=backend)(q.requires_grad_(name == "learned"), *rest)
    assert backend.keys == []


@pytest.mark.parametrize("name", [pytest.param("repeated", marks=pytest.mark.thorough), "written"])
def test_any_batch_in_generated_code(name):
    run = torch.compile(TAKEN[name], backend="te", dynamic=True, options={"fallback": "silent"})
    with torch.no_grad():
        for batch in (2, 5, 2, 7):
            given = operands(batch)
            torch.testing.assert_close(run(*given), TAKEN[name](*given), atol=0.02, rtol=0.02)
