"""Option `saved`: what a program with layers in FP8 saves, its gradients, policies, warnings and the cache key."""

import functools
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_inductor
from te_inductor import compat, ops
from te_inductor.errors import FallbackWarning, OptionError
from te_inductor.passes.joint import low_precision_saves
from te_inductor.passes.joint.low_precision_saves import SavingPartitioner
from te_inductor.passes.joint.saved_values import QUANTIZER
from tests import uncompiled
from tests.experts import MoE
from tests.ranks import told_by

pytestmark = pytest.mark.usefixtures("decomposed", "no_caches")
HIDDEN, FFN, HEADS = 256, 768, 2
told = told_by("tests.backend.saved_ranks", 2, "fsdp")


@pytest.fixture
def decomposed(monkeypatch):
    """Graphs run node by node, made of the operators that Inductor gets."""
    made = functools.partial(uncompiled.compile_fx, decompositions=select_decomp_table())
    monkeypatch.setattr(compat, "compile_fx", made)


class Attending(nn.Module):
    """The first half of Llama's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):  # (batch, tokens, HIDDEN)
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def layers(*behind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *(make() for make in behind or (Mlp,))).bfloat16()


def step(model, shape=(1, 128), recipe="delayed", **options):
    """The bytes that the second call saves, parameters and inputs apart, and the gradients."""
    torch._dynamo.reset()
    x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
    held = {}

    def pack(one):
        storage = one.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return one

    run = torch.compile(model, backend="te", options={"recipe": recipe, "policy": {"*": recipe}, **options})
    for _ in range(2):
        held.clear()
        model.zero_grad()
        with saved_tensors_hooks(pack, lambda one: one):
            loss = run(x).float().square().mean()
        loss.backward()
    return sum(one.nbytes() for one in held.values()), [one.grad.double() for one in model.parameters()]


def error(found, expected):
    """The error of all gradients together, relative to their norm."""
    off = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True))
    return float((off / sum(one.square().sum() for one in expected)).sqrt())


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_block_saves_less(recipe):
    """Residuals, gate and up take half; attention's q, k, v and output stay. Gradients are further off than FP8's by
    less than FP8's own error."""
    model = layers(Attending, Mlp)
    high, exact = step(model, recipe="none")
    fp8, by_fp8 = step(model, recipe=recipe)
    low, by_low = step(model, recipe=recipe, saved="low_precision", fallback="error")
    share = 0.57 if recipe == "delayed" else 0.73  # with scales of blocks, copies of layers' inputs are saved too
    assert low < 0.79 * fp8 and low < share * high, (high, fp8, low)
    assert 0 < error(by_low, by_fp8) < error(by_fp8, exact), (error(by_low, by_fp8), error(by_fp8, exact))


@pytest.mark.parametrize(("recipe", "split"), [("delayed", True), ("rowwise", False)])
def test_experts_save_less(recipe, split):
    """Gate and up of experts, and what experts give, which the gradients of the router's weights read."""
    torch.manual_seed(0)
    model = nn.Sequential(MoE(split=split, inner=FFN // 2, hidden=HIDDEN)).bfloat16()
    given = {"recipe": recipe, "policy": {"*.gate": "none", "*": recipe}, "shape": (256,)}
    high, exact = step(model, recipe="none", shape=(256,))
    fp8, by_fp8 = step(model, **given)
    low, by_low = step(model, **given, saved="low_precision", fallback="error")
    assert low < 0.63 * fp8 and low < 0.46 * high, (high, fp8, low)
    assert 0 < error(by_low, by_fp8) < error(by_fp8, exact), (error(by_low, by_fp8), error(by_fp8, exact))


class Checkpointed(nn.Module):
    """Layers, of which the backward computes all but the first again."""

    def __init__(self, *layers, **given):
        super().__init__()
        self.first, self.layers, self.given = nn.Linear(HIDDEN, HIDDEN), nn.ModuleList(layers), given

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.given)
        return x


def test_a_checkpoint_keeps_half():
    """Blocks' inputs are all that is saved. In the table they are what norms read."""
    torch.manual_seed(0)
    model = Checkpointed(Mlp(), Mlp()).bfloat16()
    _, exact = step(model, recipe="none")
    fp8, by_fp8 = step(model, recipe="current")
    low, by_low = step(model, recipe="current", saved="low_precision", fallback="error")
    spared = 2 * 128 * HIDDEN * (2 - 1 - 4 / 128)  # of two inputs in bf16, with a scale for each 128 values
    assert fp8 - low == spared, (fp8, low)
    assert 0 < error(by_low, by_fp8) < error(by_fp8, exact), (error(by_low, by_fp8), error(by_fp8, exact))
    options = {"policy": {"*": "current"}, "saved": "low_precision"}
    found = te_inductor.explain(model, torch.randn(1, 128, HIDDEN, dtype=torch.bfloat16), options=options)
    rows = [(one.fqn, one.reason) for one in found.saved if one.bytes_before > 1024]
    assert rows == [("layers.0.norm", None), ("layers.1.norm", None)]


class Scores(nn.Module):
    """Functions that would not bear an error by themselves."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return F.relu(x) * (x.clamp(-1, 1) @ x.transpose(-1, -2)).softmax(-1) @ x


def test_gradients_of_a_checkpoint_are_those_of_its_rounded_input():
    torch.manual_seed(0)
    model, x = Checkpointed(Scores()), torch.randn(HIDDEN, HIDDEN)
    run = torch.compile(model, backend="te", options={"policy": {"*": "none"}, "saved": "low_precision"})
    run(x).square().sum().backward()
    found = model.first.weight.grad.clone()
    with torch.no_grad():
        given = model.first(x)
        dy = 2 * model.layers[0](given)
    rounded = ops.dequantize(*ops.quantize(given, QUANTIZER), QUANTIZER, torch.float32).requires_grad_()
    model.layers[0](rounded).backward(dy)
    expected = rounded.grad.T @ x
    assert (found - expected).norm() < 1e-5 * expected.norm()


class Router(nn.Module):
    def forward(self, x):
        chosen = x.softmax(-1).topk(8).indices
        return x * torch.zeros_like(x).scatter(-1, chosen, 1.0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x):
        x = self.norm(x)[None, None]
        return F.scaled_dot_product_attention(x, x, x)[0, 0]


def attention(ctx, op, *args, **kwargs):
    saves = "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("layer", "given", "reason"),
    [
        (Router, {}, "topk.* makes integers of it"),
        (
            Attention,
            {"context_fn": functools.partial(create_selective_checkpoint_contexts, attention)},
            "a checkpoint reads it beside",
        ),
    ],
)
def test_checkpoints_that_stay(layer, given, reason):
    """A router would choose other experts, and what a selective policy saves is of the exact input."""
    torch.manual_seed(0)
    model, x = Checkpointed(layer(), **given), torch.randn(64, HIDDEN)
    grads = []
    for saved in ("high_precision", "low_precision"):
        torch._dynamo.reset()
        model.zero_grad()
        run = torch.compile(model, backend="te", options={"policy": {"*": "none"}, "saved": saved, "fallback": "warn"})
        with pytest.warns(FallbackWarning, match=reason) if saved == "low_precision" else nullcontext():
            run(x).square().sum().backward()
        grads.append([one.grad.clone() for one in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_explain_tells_what_a_compile_saves(monkeypatch):
    """Row by row, and leaves no state, as it runs nothing of what it traces."""
    model, x = layers(Mlp, Mlp, Mlp), torch.randn(1, 128, HIDDEN, dtype=torch.bfloat16)
    given = {"recipe": "delayed", "policy": {"*": "delayed"}, "saved": {"*.norm": "low_precision"}}
    found = te_inductor.explain(model, x, options=given)
    assert not te_inductor.state_dict(model) and all(one.grad is None for one in model.parameters())
    told = []
    monkeypatch.setattr(low_precision_saves, "table_of_saved", lambda report: told.extend(report.saved))
    torch.compile(model, backend="te", options=given)(x)
    assert found.saved == told and {one.reason is None for one in told} == {True, False}
    cast = [(one.fqn, one.maker, one.shape) for one in found.saved if one.reason is None]
    assert ("2.norm", "1", (1, 128, HIDDEN)) in cast, cast
    text = str(found)
    assert "option 'saved' says so" in text and re.search(r"^2-3\.norm +2 .* 128 x 256 bfloat16", text, re.M), text
    assert not te_inductor.explain(model, x, options={"recipe": "delayed"}).saved


def test_a_policy_names_the_modules_that_read():
    high_precision_of_norms = {"*.norm": "high_precision", "*": "low_precision"}
    policies = ("high_precision", "low_precision", {"*.norm": "low_precision"}, high_precision_of_norms)
    fp8, both, norms, others = (step(layers(), recipe="current", saved=one)[0] for one in policies)
    assert both < others < norms < fp8
    assert (fp8 - norms) + (fp8 - others) == fp8 - both


def test_a_glob_that_matches_nothing_is_said():
    with pytest.warns(FallbackWarning, match=r"'saved' has no effect here: found '\*\.nrom', expected globs of .*norm"):
        step(layers(), recipe="current", saved={"*.nrom": "low_precision"})


def test_nothing_to_save_is_said():
    """A last layer alone saves its input's copy."""
    with pytest.warns(FallbackWarning, match="option 'saved' does not reach, because the backward spreads it"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)).bfloat16()
        x = torch.randn(64, HIDDEN, dtype=torch.bfloat16)
        run = torch.compile(model, backend="te", options={"policy": {"*": "none"}, "saved": "low_precision"})
        run(x).sum().backward()


def test_a_failure_of_ours_leaves_the_program_as_it_was(monkeypatch):
    def fails(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(low_precision_saves, "decide", fails)
    model, x = layers(), torch.randn(1, 64, HIDDEN, dtype=torch.bfloat16)
    with pytest.warns(FallbackWarning, match="a fault of ours"):
        torch.compile(model, backend="te", options={"policy": {"*": "current"}, "saved": "low_precision"})(
            x
        ).sum().backward()
    assert all(one.grad is not None for one in model.parameters())


def test_hooks_may_copy_what_is_saved():
    """Hooks that offload it do: codes, scales and bits are tensors like others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU()).bfloat16()
    x, dtypes, found = torch.randn(128, HIDDEN, dtype=torch.bfloat16), set(), []

    def pack(one):
        dtypes.add(one.dtype)
        return one.clone()

    run = torch.compile(model, backend="te", options={"policy": {"*": "current"}, "saved": "low_precision"})
    for hooks in (nullcontext(), saved_tensors_hooks(pack, torch.clone)):
        model.zero_grad()
        with hooks:
            loss = run(x).float().square().mean()
        loss.backward()
        found.append([one.grad.clone() for one in model.parameters()])
    assert all(map(torch.equal, *found)) and {torch.float8_e4m3fn, torch.int64} <= dtypes


def test_inference_is_as_it_was():
    model, x = layers(), torch.randn(1, 64, HIDDEN, dtype=torch.bfloat16)
    found = []
    for saved in ("high_precision", "low_precision"):
        torch._dynamo.reset()
        run = torch.compile(model, backend="te", options={"recipe": "current", "saved": saved})
        with torch.no_grad():
            found.append(run(x))
    assert torch.equal(*found)


def test_a_dynamic_length():
    model = layers()
    run = torch.compile(
        model, backend="te", dynamic=True, options={"policy": {"*": "current"}, "saved": "low_precision"}
    )
    for tokens in (64, 80, 96):
        run(torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)).sum().backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


def test_parameters_that_fsdp_shards(told):
    """Each rank saves less by half of gate and up at least, and both have the same gradients: off by less than a
    product of gate and up, each of which E4M3 rounds by up to 1/16."""
    first, second = told["fsdp"]
    assert first["off"] == second["off"] and 0 < first["off"] < 2**-3, (first, second)
    gate = 4 * 256 * 256  # bytes in fp32
    assert all(one["high"] - one["low"] > gate for one in (first, second)), (first, second)
    assert not any(map(len, told.said("fsdp")))


@pytest.mark.parametrize("saved", ["fp8", {"*": "e4m3"}, {3: "low_precision"}])
def test_other_values_are_errors(saved):
    with pytest.raises(OptionError, match="saved"):
        te_inductor.explain(nn.Linear(32, 32), torch.randn(4, 32), options={"saved": saved})


def test_the_cache_key_has_the_option():
    one, other = (SavingPartitioner(None, (("*", value),)) for value in ("low_precision", "high_precision"))
    assert one.uuid() != other.uuid() and one.uuid() == SavingPartitioner(None, (("*", "low_precision"),), print).uuid()
