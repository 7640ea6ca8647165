"""options={"guard": …}: planted faults, what each word does about them, what is counted, logged and saved."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import statistics, targets
from te_inductor.errors import FallbackWarning, StateError
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state import misfits, state_inputs, store
from tests.backend.delayed_programs import te
from tests.ranks import told_by

pytestmark = pytest.mark.usefixtures("without_tracing")
RECIPE = DelayedScaling(amax_history_len=8)
RANKS = "faulty outlier,faulty change"
MOVED = {"moved plain": 2, "moved ddp": 4}  # graphs: before and behind the move, and of a microbatch
told = told_by("tests.backend.guard_ranks", 2, f"{RANKS},{','.join(MOVED)}")


class Trained:
    """A layer beside itself in high precision, step by step."""

    def __init__(self, guard: str, of: nn.Module | None = None, **options) -> None:
        self.layer = of or nn.Linear(64, 64)
        self.run = te(self.layer, recipe=RECIPE, fallback="silent", guard=guard, **options)

    def step(self, x: torch.Tensor) -> float:
        """The relative error of the output."""
        y = self.run(x)
        y.square().mean().backward()
        high = self.layer(x)
        return ((y - high).norm() / high.norm()).item()

    @property
    def slot(self):
        return statistics(self.layer).slots[0]

    @property
    def history(self) -> list[float]:
        return te_inductor.state_dict(self.layer)["input.amax_history"].tolist()


class Alternating:
    """Two layers, of which the first has a channel that keeps changing its magnitude, also in a copy of the model."""

    def __init__(self, guard: str = "heal", wide: int = 64, **options) -> None:
        torch.manual_seed(1)
        self.layer = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide))
        with torch.no_grad():
            self.layer[0].weight[:, 0] = 0.0  # so that no other tensor changes
        self.run = te(self.layer, **{"recipe": RECIPE, "fallback": "silent", "guard": guard} | options)

    @staticmethod
    def batch(step: int, wide: int = 64) -> torch.Tensor:
        x = torch.randn(32, wide, generator=torch.Generator().manual_seed(step))
        return torch.cat([x[:, :1] * (1e6 if step % 3 else 1.0), x[:, 1:]], 1)

    def steps(self, begin: int, end: int) -> list[torch.Tensor]:
        """Losses, and then gradients of the last one."""
        losses = []
        for step in range(begin, end):
            self.layer.zero_grad()
            loss = self.run(self.batch(step, self.layer[0].in_features)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(p.grad for p in self.layer.parameters())]

    @property
    def moved(self) -> list[str]:
        return [f"{one.fqn}.{one.slot}" for one in statistics(self.layer).slots if one.moved]


@pytest.fixture
def compiles():
    """Returns how many graphs Dynamo has compiled in the test."""
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    return lambda: counted["unique_graphs"] - before


LOOKED = 32 + 16  # calls: behind the last of these a guard decides for the first time


def outlier(x):
    x = x.clone()
    x[0, 0] = 1e30
    return x


@pytest.mark.parametrize("guard", ["warn", "heal", "off"])
def test_a_planted_outlier(guard):
    """An outlier that nothing keeps out rules the scale until the history has forgotten it, and all else becomes 0."""
    trained, x = Trained(guard), torch.randn(32, 64)
    for _ in range(3):
        trained.step(x)
    before = trained.slot
    trained.step(outlier(x))
    after = trained.slot
    errors = [trained.step(x) for _ in range(2)]
    if guard == "off":
        assert after.counts is None
    else:
        assert (after.counts.steps, after.counts.cut, after.counts.first) == (4, 1, 4)
    if guard == "heal":
        assert after.scale == before.scale and after.counts.kept_out == 1 and max(trained.history) < 10
        assert max(errors) < 0.1 and trained.slot.counts.own == before.counts.own + 1  # the call behind it
    else:
        assert after.scale < 1e-20 and max(trained.history) == pytest.approx(1e30) and min(errors) > 0.9
        assert guard == "off" or not after.counts.kept_out


def test_a_change_that_stays():
    """It is kept out twice, while calls cast by own amaxes, then it is the tensor's new magnitude. Its gradient, which the
    first call's cast has cut, follows a step later."""
    trained, x = Trained("heal"), torch.randn(32, 64)
    for _ in range(3):
        trained.step(x)
    own, errors = trained.slot.counts.own, [trained.step(1000 * x) for _ in range(5)]
    assert errors[0] > 0.5 and max(errors[1:]) < 0.1
    found = trained.slot
    assert (found.counts.kept_out, found.counts.cut, found.counts.own - own) == (2, 1, 3)
    assert found.headroom == pytest.approx(0, abs=1e-3)


def test_a_tensor_that_shrinks():
    """The history keeps the scale of what was; calls cast by own amaxes for as long."""
    trained, x = Trained("heal"), torch.randn(32, 64)
    for _ in range(3):
        trained.step(x)
    assert max([trained.step(x / 2**16) for _ in range(3)][1:]) < 0.1
    assert trained.slot.counts.coarse == 1


def test_a_tensor_that_has_shrunk_before_its_state_is_loaded():
    """The first call of a process that goes on knows from the history what the last one knew from its counts."""
    trained, x = Trained("heal"), torch.randn(32, 64)
    for scale in (1, 1, 1, 2**-16, 2**-16):
        trained.step(x * scale)
    resumed = Trained("heal", of=copy.deepcopy(trained.layer))
    te_inductor.load_state_dict(resumed.layer, te_inductor.state_dict(trained.layer))
    own = trained.slot.counts.own
    assert max([resumed.step(x / 2**16) for _ in range(2)]) < 0.1
    assert resumed.slot.counts.own == own + 2
    suited = Trained("heal", of=copy.deepcopy(resumed.layer))
    te_inductor.load_state_dict(suited.layer, te_inductor.state_dict(resumed.layer))
    assert suited.step(x) < 0.1


def test_a_batch_of_another_size():
    """Gradients of a mean are larger in a smaller batch, which the host knows beforehand."""
    trained, x = Trained("heal"), torch.randn(64, 64)
    for _ in range(3):
        trained.step(x)
    own = trained.slot.counts.own
    for rows, more in ((48, 0), (16, 1), (16, 0)):
        trained.step(x[:rows])
        own += more
        assert trained.slot.counts.own == own
    assert not [one for one in statistics(trained.layer).slots if one.misfits]


def test_what_runs_in_between():
    """Evaluation, also of another batch size, and another model change nothing. A copy of the model starts anew."""
    trained, other, x = Trained("heal"), Trained("heal"), torch.randn(32, 64)
    for step in range(5):
        trained.step(outlier(x) if step == 3 else x)
        if step == 3:
            copied = Trained("heal", of=copy.deepcopy(trained.layer))
        with torch.no_grad():
            for rows in (32, 4):
                trained.run(x[:rows])
        other.step(x)
    found = trained.slot.counts
    assert (found.steps, found.cut, found.kept_out, found.own, found.first) == (5, 1, 1, 2, 4)
    assert (other.slot.counts.kept_out, other.slot.counts.own, other.slot.counts.first) == (0, 1, 0)
    assert copied.step(x) < 0.1 and copied.step(x) < 0.1
    assert (copied.slot.counts.steps, copied.slot.counts.kept_out) == (2, 0)


def test_acts_are_logged_once(monkeypatch):
    trained, x, texts = Trained("heal"), torch.randn(32, 64), []
    monkeypatch.setattr(state_inputs.log, "warning", lambda form, text: texts.append(form % text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # fallback="silent" says nothing
        for one in (x, x, outlier(x), x, x, x):
            trained.step(one)
    assert len(texts) == 2 and "(root).input" in texts[0] and "kept out" in texts[0] and "own amaxes" in texts[1]


def test_what_was_done_is_saved():
    trained, x = Trained("heal"), torch.randn(32, 64)
    for one in (x, x, outlier(x), x):
        trained.step(one)
    saved, before = te_inductor.state_dict(trained.layer), trained.slot.counts
    assert saved["input.guard"].tolist() == [1, before.own, 0]
    assert not any("guard" in key for key in te_inductor.state_dict(Trained("warn").layer))
    other = Trained("heal")
    te_inductor.load_state_dict(other.layer, saved)
    assert te_inductor.state_dict(other.layer)["input.guard"].tolist() == [1, before.own, 0]
    other.step(x)
    assert (other.slot.counts.kept_out, other.slot.counts.own) == (1, before.own)
    for _ in range(2):  # in place, what is running is counted from what was saved on
        te_inductor.load_state_dict(trained.layer, saved)
        assert te_inductor.state_dict(trained.layer)["input.guard"].tolist() == [1, before.own, 0]
        trained.step(x)
    without = {key: value for key, value in saved.items() if not key.endswith("guard")}
    assert te_inductor.load_state_dict(trained.layer, without) == ([], [])
    with pytest.raises(StateError, match="two counts"):
        te_inductor.load_state_dict(trained.layer, saved | {"input.guard": torch.ones(2)})


def test_a_graph_without_gradients_is_left_alone():
    trained, x = Trained("heal"), torch.randn(32, 64)
    trained.step(x)
    with torch.no_grad():
        for rows in (32, 8):
            trained.run(x[:rows])
    assert trained.slot.counts.steps == 1


def test_a_graph_without_gradients_casts_by_own_amaxes_too():
    """A history that remembers larger amaxes has no scale for an evaluation either."""
    trained, x = Trained("heal"), torch.randn(32, 64)
    trained.step(outlier(x))  # the first step, which has nothing to keep it out by
    for _ in range(2):  # the first of them right behind the first step that knows of it
        trained.step(x)
        with torch.no_grad():
            found, high = trained.run(x), trained.layer(x)
        assert ((found - high).norm() / high.norm()).item() < 0.1


@pytest.mark.parametrize("case", RANKS.split(","))
def test_ranks_do_the_same(case, told):
    """The amaxes are reduced first: what one rank alone has seen is kept out of both histories, and both cast by own
    amaxes."""
    first, second = told[case]
    assert first == second
    assert first["kept out"] == (1 if case == "faulty outlier" else 2) and first["own"] > first["own before"]
    assert (max(first["history"]) < 10) == (case == "faulty outlier")


def test_a_layer_that_keeps_failing_is_moved(compiles):
    """The model behind the decision runs as under a policy that names the other recipe, bit for bit, after one compile.
    What is saved says so to another process."""
    trained = Alternating()
    trained.steps(0, LOOKED - 1)
    assert (trained.moved, compiles()) == ([], 1)
    trained.steps(LOOKED - 1, LOOKED)
    assert trained.moved == ["0.input", "0.weight", "0.grad_output"] and compiles() == 1
    saved = te_inductor.state_dict(trained.layer)
    assert [key for key in saved if key.endswith("guard") and saved[key][2]] == ["0.input.guard"]

    others = {how: Alternating(**options) for how, options in {
        "policy": {"policy": {"0": "rowwise"}}, "resumed": {}, "resumed and warned": {"guard": "warn"},
    }.items()}  # fmt: skip
    losses = trained.steps(LOOKED, LOOKED + 6)
    assert compiles() == 2 and len(trained.moved) == 3  # not again, though its counts are as they were
    for how, other in others.items():
        te_inductor.load_state_dict(other.layer, saved)
        found = other.steps(LOOKED, LOOKED + 6)
        assert all(map(torch.equal, losses, found)), how
        assert te_inductor.state_dict(other.layer)["0.input.guard"].tolist() == saved["0.input.guard"].tolist(), how
    again = Alternating()
    again.steps(0, 2)
    before = compiles()
    te_inductor.load_state_dict(again.layer, saved)  # in place: it moves, and back
    assert all(map(torch.equal, losses, again.steps(LOOKED, LOOKED + 6))) and compiles() == before
    te_inductor.load_state_dict(again.layer, saved | {"0.input.guard": torch.zeros(3)})
    again.steps(0, 1)
    assert compiles() == before and again.moved == []  # graphs that were compiled serve it


def test_a_layer_that_blocks_divide_is_moved_to_them():
    """They keep a channel's outliers to a part of each row, where a scale of a row does not."""
    moved, like = Alternating(wide=128), Alternating(wide=128, policy={"0": "block"})
    te_inductor.load_state_dict(moved.layer, {"0.input.guard": torch.tensor([0.0, 0.0, 1.0])}, strict=False)
    assert all(map(torch.equal, moved.steps(0, 3), like.steps(0, 3)))
    assert {one.moved for one in statistics(moved.layer).slots if one.fqn == "0"} <= {"block"}


HOPPER = targets.by_name("h100")
ADA = replace(HOPPER, can=HOPPER.can & ~targets.Ability.BLOCK_SCALES)


@pytest.mark.parametrize(("shape", "target", "recipe"), [
    ((256, 128), HOPPER, "block"), ((8, 256, 128), HOPPER, "block"), ((256, 64), HOPPER, "rowwise"),
    ((192, 128), HOPPER, "rowwise"), ((256, 128), ADA, "rowwise"), ((256, 128), None, "block"),
])  # fmt: skip
def test_the_recipe_that_a_guard_moves_to(shape, target, recipe):
    with targets.taken_for(target):
        assert store.recipe_behind(nn.Parameter(torch.empty(shape))) == recipe


def test_what_does_not_move(compiles):
    """A spike, a change that stays, and what a guard does not heal."""
    x = torch.randn(32, 64)
    trained = Trained("heal")
    for step in range(LOOKED + 1):
        trained.step(outlier(x) if step == 8 else x * (1.0 if step < 20 else 300.0))
    warned = Alternating("warn")
    warned.steps(0, LOOKED + 1)
    assert trained.slot.counts.kept_out == 3 and compiles() == 2
    assert trained.slot.moved is None and warned.moved == []


def test_layers_that_cannot_be_moved_are_named_once(monkeypatch, compiles):
    """A process compiles so many graphs anew, and a graph that has no guard on moves does not follow loaded state."""
    monkeypatch.setattr(misfits, "MOST_GRAPHS", 0)
    trained = Alternating(fallback="warn")
    with pytest.warns(FallbackWarning) as caught:
        trained.steps(0, LOOKED + 33)
    texts = [str(one.message) for one in caught if "not moved to another recipe" in str(one.message)]
    assert len(texts) == 1 and "0.input" in texts[0] and trained.moved == [] and compiles() == 1
    state = te_inductor.state_dict(trained.layer) | {"0.weight.guard": torch.tensor([0.0, 0.0, 1.0])}
    loaded = Alternating("warn", fallback="warn")
    loaded.steps(0, 1)
    te_inductor.load_state_dict(loaded.layer, state)
    with pytest.warns(FallbackWarning, match="runs them under delayed scaling: 0; load it before"):
        loaded.steps(1, 2)


def test_a_checkpoint_around_a_compiled_layer_keeps_its_recipe():
    """Its backward calls the graph again, which has to be that of the forward."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    run = te(layer, recipe=RECIPE, fallback="warn", guard="heal")
    with pytest.warns(FallbackWarning) as caught:
        for step in range(LOOKED + 1):
            x = Alternating.batch(step).requires_grad_()
            checkpoint(run, x, use_reentrant=False).square().mean().backward()
    stays = "because a checkpoint around the compiled module runs its forward again"
    assert [stays in str(one.message) for one in caught].count(True) == 1
    assert statistics(layer).slots[0].moved is None


@pytest.mark.parametrize(("case", "graphs"), MOVED.items())
def test_ranks_move_at_the_same_call(told, case, graphs):
    """The outliers are one rank's alone."""
    first, second = told[case]
    assert first == second and first["graphs"] == graphs
    assert first["moved"] == [False] * (8 + 4) + [True] * 8
