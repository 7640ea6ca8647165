"""Weights that are cast once: options={"weights": "once"} computes bit for bit what casting them at each call computes,
whatever is done to a weight, and casts only what has changed.
"""

import copy
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from te_inductor import explain, load_state_dict, state_dict, targets
from te_inductor.errors import FallbackError, FallbackWarning, OptionError
from te_inductor.passes.pre_grad.decide import cached_weights as decide
from te_inductor.recipes import DelayedScaling, Float8BlockScaling, Quantizer, Slots
from te_inductor.runtime.weights import cached_weights
from tests.backend.delayed_programs import checkpointed
from tests.support.cached_weights import RECIPES, Pair, te
from tests.support.trained import Attention, mlp

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")


@pytest.mark.quick("delayed", "nvfp4")
@pytest.mark.traced
@pytest.mark.parametrize(
    "recipe",
    [*RECIPES, pytest.param("current", marks=[pytest.mark.codegen, pytest.mark.thorough], id="current, compiled")],
)
def test_accumulation(recipe, casts):
    """Four microbatches a step: each weight is cast once a step."""
    size = 128 if recipe == "block" else 32
    pair = Pair(nn.Sequential(nn.Linear(size, 128), nn.GELU(), nn.Linear(128, size)), recipe=recipe)
    steps = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in pair.models]
    for step in range(3):
        for _ in range(4):
            pair.backward(pair(torch.randn(8, size)))
        assert len(casts) == 2 * (step + 1) if recipe != "delayed" else 2 * (step + 1) <= len(casts) <= 4 * (step + 1)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()


def ema(model) -> None:
    """Swaps averages in as is often done: behind the back of the version counter."""
    for p in model.parameters():
        version = p._version
        p.data.copy_(p.data * 0.5)
        assert p._version == version


def no_grad(model) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1


def load(model, **options) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, **options)


def reassign_data(model) -> None:
    model[0].weight.data = model[0].weight.data * 3


def set_(model) -> None:
    with torch.no_grad():
        model[0].weight.set_(model[0].weight.detach() * 3)


def through_numpy(model) -> None:
    model[0].weight.detach().numpy()[3] = numpy.float32(0.25)


def one_bit(model) -> None:
    model[2].weight.data.view(torch.int32)[-1, -1] ^= 1


def new_parameter(model) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 3)


def optimize(model, **options) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()


CHANGES = {
    "ema": ema,
    "no_grad": no_grad,
    "load": load,
    "assign": partial(load, assign=True),
    "data": reassign_data,
    "set": set_,
    "numpy": through_numpy,
    "one_bit": one_bit,
    "parameter": new_parameter,
    "foreach": partial(optimize, foreach=True),
    "fused": partial(optimize, fused=True),
}


@pytest.mark.quick("no_grad", "load", "data", "numpy", "one_bit", "foreach")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_seen(change, casts):
    pair = Pair(mlp())
    pair.backward(pair())
    before = len(casts)
    pair.each(lambda model: (model.zero_grad(), change(model)))
    pair.backward(pair())
    assert before < len(casts) <= before + 4
    made = len(casts)
    pair.backward(pair())
    assert len(casts) == made


def test_a_change_and_back(casts):
    """A look is at the values, not at what was done."""
    pair = Pair(mlp())
    pair()
    pair.each(lambda model: (model[0].weight.data.neg_(), model[0].weight.data.neg_()))
    pair()
    assert len(casts) == 2


@pytest.mark.quick("inference_mode")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode, casts):
    """Row copies alone; training behind it adds the columns, for the layer that has a gradient to pass on."""
    pair = Pair(mlp())
    for batch in (8, 8, 12):
        with mode():
            pair(torch.randn(batch, 32))
    assert len(casts) == 2 and all(kept.data_t is None for kept in casts)
    pair.backward(pair())
    assert len(casts) == 3 and casts[2].data_t is not None
    with mode():
        pair()
    assert len(casts) == 3


class Conv1D(nn.Module):
    """GPT-2's: the parameter holds (K, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


class Tied(nn.Module):
    """Both orders of one parameter, and twice the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return F.linear(F.linear(x, self.weight).relu(), self.weight) @ self.weight


MODELS = {
    "conv1d": Conv1D,
    "merged": Attention,
    "checkpoint": checkpointed,
    "autocast": Autocast,
    "tied": Tied,
}


@pytest.mark.traced
@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "delayed", "nvfp4"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_programs(make, recipe, casts):
    model = make()
    pair = Pair(model, recipe=recipe)
    shape = (2, 4, 32) if make is Attention else (8, 32)
    for _ in range(2):
        x = torch.randn(shape, requires_grad=True)
        pair.backward(pair(x))
    made = len(set(map(id, casts)))
    assert 0 < made == len(casts) if recipe != "delayed" else 0 < made <= len(casts)
    pair.each(ema)
    pair.backward(pair(torch.randn(shape, requires_grad=True)))
    assert len(casts) == 2 * made or recipe == "delayed"


def test_delayed_scaling_casts_with_the_scale_of_the_step(casts):
    """Copies are made of a weight and a scale. Where both have settled they are kept; loading a state changes the
    scale."""
    pair = Pair(mlp(), recipe="delayed")
    for _ in range(4):
        pair.backward(pair())
    assert len(casts) == 4  # with scale 1, then with that of the first call
    with torch.no_grad():
        pair()
    assert len(casts) == 4
    for model in pair.models:
        load_state_dict(model, {key: value * 2 for key, value in state_dict(model).items()})
    pair.backward(pair())
    assert len(casts) == 6


def test_microbatches_in_flight():
    pair = Pair(mlp())
    first, second = pair(), pair(scale=8.0)
    pair.backward(first)
    pair.backward(second)


def test_a_weight_that_changes_before_its_backward():
    """The copies behind another forward are others, which autograd finds as in eager code; without one they are its
    own."""
    model = mlp()
    run = te(model, weights="once")
    y = run(torch.randn(8, 32))
    no_grad(model)
    y.sum().backward()
    y = run(torch.randn(8, 32))
    with torch.no_grad():
        model[2].weight.mul_(2)
    run(torch.randn(8, 32))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_models_share_nothing_and_die():
    model = mlp()
    twin = copy.deepcopy(model)
    ema(twin)
    runs, high = [te(one, weights="once") for one in (model, twin)], [model, twin]
    for _ in range(2):
        x = torch.randn(8, 32)
        for run, one in zip(runs, high, strict=True):
            assert (run(x) - one(x)).norm() < 0.1 * one(x).norm()
    kept = weakref.ref(next(iter(cached_weights._cached.values(twin[0].weight)[0].values())))
    del twin, one, run, high, runs[1]
    gc.collect()
    assert kept() is None


def test_blocks_of_one_graph(casts):
    """Compiled one by one they run one graph, each with its own copies."""

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp() for _ in range(3))

    model = Each()
    runs = [te(block, weights="once") for block in model.blocks]
    others = [te(copy.deepcopy(block), weights="each_call") for block in model.blocks]
    for _ in range(2):
        x = torch.randn(8, 32)
        for run, other in zip(runs, others, strict=True):
            assert torch.equal(run(x), other(x))
    assert len(casts) == 6


@pytest.mark.filterwarnings("ignore::te_inductor.errors.FallbackWarning")
def test_fsdp(one_rank):
    """A gathered parameter keeps its version and loses its memory: nothing is kept of it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x)

    losses = []
    for weights in ("once", "each_call"):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        for block in model:
            block.compile(backend="te", options={"recipe": "current", "weights": weights})
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                loss = model(torch.randn(8, 32)).square().sum()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
    assert losses[:6] == losses[6:] and not cached_weights._cached


def test_functional_call(casts):
    model = mlp()
    run = te(lambda parameters, x: torch.func.functional_call(model, parameters, (x,)), weights="once")
    plain = te(lambda parameters, x: torch.func.functional_call(model, parameters, (x,)), weights="each_call")
    for factor in (1.0, 2.0, 2.0):
        parameters = {name: nn.Parameter(p.detach() * factor) for name, p in model.named_parameters()}
        x = torch.randn(8, 32)
        assert torch.equal(run(parameters, x), plain(parameters, x))


def test_threads():
    """Several threads that meet a changed weight at once."""
    model = nn.Linear(256, 256)
    twin = copy.deepcopy(model)
    run, plain = torch.no_grad()(te(model, weights="once")), torch.no_grad()(te(twin, weights="each_call"))
    x = torch.randn(16, 256)
    run(x)
    for _ in range(5):
        ema(model), ema(twin)
        expected = plain(x)
        found: list = []
        threads = [threading.Thread(target=lambda found=found: found.append(run(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(torch.equal(y, expected) for y in found)


def test_what_is_cast_at_each_call_is_said():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.rows = nn.Linear(128, 128), nn.Linear(128, 128)
            self.experts = nn.Parameter(torch.randn(2, 128, 128))
            self.odd = nn.Parameter(torch.randn(128, 128).t())

        def forward(self, x):
            x = self.rows(self.plain(x))
            return F.linear(F.linear(x, self.experts[0]), self.odd)

    one_row = Float8BlockScaling(w_block_scaling_dim=1)
    options = {"recipe": "current", "weights": "once", "policy": {"rows": one_row}}
    model, x = Model(), torch.randn(8, 128)
    report = explain(model, x, options=options)
    unmet = {fqn: reason for _, fqn, reason in report.unmet}
    assert unmet["rows"] == "copies with scales of 1x128 are not kept" and "plain" not in unmet
    assert "option 'weights' does not reach rows: copies with" in str(report)
    with pytest.warns(FallbackWarning, match="does not reach, because copies with scales of 1x128 are not kept: rows"):
        y = te(model, **options, fallback="warn")(x)
    y.sum().backward()
    assert torch.isfinite(model.experts.grad).all()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="option 'weights' does not reach") as raised:
        te(model, **options)(x)
    assert isinstance(raised.value.inner_exception, FallbackError)


def test_blocks_that_choose_are_cast_at_each_call_on_a_gpu():
    """There a kernel of ours keeps copies."""
    chosen = Quantizer("e2m1", scope="16x16", candidates=(6.0, 4.0), error_metric="MAE")
    slots = Slots.of(Quantizer("e2m1", scope="1x16"), chosen, Quantizer("e2m1", scope="1x16"))
    with FakeTensorMode():
        weight = SimpleNamespace(meta={"example_value": torch.empty(32, 32, device="cuda")})
    match = SimpleNamespace(parts=(), weight=weight, first_refusal=lambda ask: None)
    with targets.taken_for(targets.by_name("h100")):
        refusal = decide.refusal(match, slots, None, (), set())
    assert str(refusal) == "the kernel that keeps copies does not choose between 4 and 6"


@pytest.mark.quick("delayed", "rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_of_microbatches(recipe, casts, recwarn):
    """Each weight is cast once a step, whatever changed it; under delayed scaling for a scale too."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    twin = copy.deepcopy(model)
    run, plain = te(model, recipe=recipe, weights="once"), te(twin, recipe=recipe, weights="each_call")
    for step, change in enumerate((load, ema, load)):
        for _ in range(4):
            x = torch.randn(8, 128)
            ys = run(x), plain(x)
            assert torch.equal(*ys)
            for y in ys:
                y.square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        expected = 2 * (step + 1)
        assert len(casts) == expected or (recipe == "delayed" and expected <= len(casts) < 8 * (step + 1)), len(casts)
        for one in (model, twin):
            change(one)
            one.zero_grad()
    said = [str(one.message) for one in recwarn if issubclass(one.category, FallbackWarning)]
    assert all("did not suit" in text for text in said)  # scales, of weights that were loaded in between


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_weight_at_an_odd_address(recipe, casts):
    """The address is that of a flat buffer behind a bias of one element."""
    layer = nn.Linear(128, 128).bfloat16()
    pair = Pair(layer, recipe=recipe)
    for one in pair.models:
        flat = torch.cat([one.weight.detach().new_zeros(1), one.weight.detach().flatten()])
        one.weight.data = flat[1:].view(128, 128)
    for _ in range(2):
        pair.backward(pair(torch.randn(8, 128).bfloat16()))
    assert len(casts) == 1 or recipe == "delayed"


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_nothing_is_kept_without_the_option(recipe, casts):
    """Copies lift the peak of memory: Note [Copies that pay]."""
    te(nn.Linear(128, 128), recipe=recipe)(torch.randn(16, 128))
    assert not casts and not cached_weights._cached


def test_option():
    with pytest.raises(
        Exception, match="unknown value of option 'weights' 'twice'; expected one of each_call, once"
    ) as raised:
        te(mlp(), weights="twice")(torch.randn(8, 32))
    assert isinstance(raised.value.inner_exception, OptionError)


@pytest.mark.parametrize("scope", ["tensor", "128x128"])
def test_digests(scope):
    """One of a weight, or one of each tile, also where it is of several parameters. A word that moves, or a bit that
    turns, is another digest, of that tile alone."""
    spec = cached_weights.Spec(Quantizer("e4m3", scope=scope), False, 1)
    whole = torch.randn(256, 200)
    found = cached_weights.digests(spec, [whole])
    assert found.tolist() == cached_weights.digests(spec, [whole[:128], whole[128:]]).tolist()
    assert len(found) == cached_weights.new(spec, [whole]).digests.numel() == {"tensor": 1, "128x128": 4}[scope]
    others = {tuple(found.tolist())}
    for bit in range(0, whole.nbytes * 8, 65521):
        other = whole.clone()
        other.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
        digests = cached_weights.digests(spec, [other])
        assert (digests != found).sum() == 1
        others.add(tuple(digests.tolist()))
    for other in (whole.flip(0), whole.flip(1), -whole, whole.roll(16, 0), whole.roll(1, 0), whole.roll(128, 0)):
        digests = cached_weights.digests(spec, [other])
        assert (digests != found).all()
        others.add(tuple(digests.tolist()))
    assert len(others) == 7 + len(range(0, whole.nbytes * 8, 65521))


def test_a_digest_holds_the_given_scale():
    spec = cached_weights.Spec(Quantizer("e4m3"), False, 1, DelayedScaling())
    w, scales = torch.randn(128, 130), [torch.tensor(value) for value in (1.0, 2.0, 2.0**-126, 448.0)]
    found = torch.stack([cached_weights.digests(spec, [w], scale) for scale in scales])
    assert found.shape == (4, 2) and len(set(found.flatten().tolist())) == 8
    assert (cached_weights.digests(spec, [torch.zeros(128, 128)], torch.tensor(0.0)) != 0).all()
