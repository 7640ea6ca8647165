"""options={"guard": …}: planted faults, what each word does about them, what is counted, logged and saved."""

import warnings

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor import statistics
from te_inductor.errors import StateError
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state import state_inputs
from tests.backend.delayed_programs import te
from tests.ranks import told_by

pytestmark = pytest.mark.usefixtures("without_tracing")
RECIPE = DelayedScaling(amax_history_len=8)
RANKS = "faulty outlier,faulty change"
told = told_by("tests.backend.guard_ranks", 2, RANKS)


class Trained:
    """A layer beside itself in high precision, step by step."""

    def __init__(self, guard: str, **options) -> None:
        self.layer = nn.Linear(64, 64)
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
    assert saved["input.guard"].tolist() == [1, before.own]
    assert not any("guard" in key for key in te_inductor.state_dict(Trained("warn").layer))
    other = Trained("heal")
    te_inductor.load_state_dict(other.layer, saved)
    assert te_inductor.state_dict(other.layer)["input.guard"].tolist() == [1, before.own]
    other.step(x)
    assert (other.slot.counts.kept_out, other.slot.counts.own) == (1, before.own)
    for _ in range(2):  # in place, what is running is counted from what was saved on
        te_inductor.load_state_dict(trained.layer, saved)
        assert te_inductor.state_dict(trained.layer)["input.guard"].tolist() == [1, before.own]
        trained.step(x)
    without = {key: value for key, value in saved.items() if not key.endswith("guard")}
    assert te_inductor.load_state_dict(trained.layer, without) == ([], [])
    with pytest.raises(StateError, match="two counts"):
        te_inductor.load_state_dict(trained.layer, saved | {"input.guard": torch.ones(3)})


def test_a_graph_without_gradients_is_left_alone():
    trained, x = Trained("heal"), torch.randn(32, 64)
    trained.step(x)
    with torch.no_grad():
        for rows in (32, 8):
            trained.run(x[:rows])
    assert trained.slot.counts.steps == 1


@pytest.mark.parametrize("case", RANKS.split(","))
def test_ranks_do_the_same(case, told):
    """The amaxes are reduced first: what one rank alone has seen is kept out of both histories, and both cast by own
    amaxes."""
    first, second = told[case]
    assert first == second
    assert first["kept out"] == (1 if case == "faulty outlier" else 2) and first["own"] > first["own before"]
    assert (max(first["history"]) < 10) == (case == "faulty outlier")
