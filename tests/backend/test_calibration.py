"""calibrate: the search against brute force, what it measures, what it chooses and promises, and its file."""

import copy
import itertools
import json
import random

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor import Calibration, calibrate, explain, recipes
from te_inductor.api.calibration.knapsack import Alternative, choose
from te_inductor.api.calibration.policy import glob_of
from te_inductor.api.calibration.times import by_gemm, choices
from te_inductor.api.calibration.units import spearman
from te_inductor.errors import OptionError


def brute_force(items: list[list[Alternative]], budget: int) -> tuple[float, int] | None:
    """The least cost within the budget, and the least time that has it."""
    found = [
        (sum(option.cost for option in chosen), sum(option.time for option in chosen))
        for chosen in itertools.product(*items)
        if sum(option.time for option in chosen) <= budget
    ]
    return min(found) if found else None


def test_the_search_is_exact():
    """Costs are multiples of 1/64, whose sums are exact; many are equal, and many options are useless."""
    draw = random.Random(torch.initial_seed())
    for _ in range(300):
        items = [
            [Alternative(draw.randrange(12), draw.randrange(24) / 64) for _ in range(draw.randrange(1, 6))]
            for _ in range(draw.randrange(1, 6))
        ]
        budget = draw.randrange(45)
        chosen, best = choose(items, budget), brute_force(items, budget)
        if best is None:
            assert chosen is None
            continue
        taken = [options[place] for options, place in zip(items, chosen, strict=True)]
        assert (sum(one.cost for one in taken), sum(one.time for one in taken)) == best


def test_the_search_does_not_hang_on_how_costs_are_added_up():
    """What is left of the sum of costs is a rounding, of either sign, where there is time for all that costs nothing."""
    draw = random.Random(0)
    for _ in range(200):
        items = [[Alternative(0, draw.random() * 1e-3), Alternative(3, 0.0)] for _ in range(draw.randrange(1, 9))]
        assert choose(items, 3 * len(items)) == [1] * len(items)


def test_the_search_of_a_deep_model_is_quick():
    """These are 256 layers with 12 distinct options each, of which the relaxed problem leaves few to look at."""
    draw = random.Random(0)
    items = [[Alternative(draw.randrange(10**6), draw.random()) for _ in range(12)] for _ in range(256)]
    fastest = sum(min(options).time for options in items)
    budget = round(1.03 * fastest + 10**6)
    chosen = choose(items, budget)
    assert sum(options[place].time for options, place in zip(items, chosen, strict=True)) <= budget


def test_rank_correlation():
    assert spearman([1.0, 2.0, 3.0, 9.0], [0.1, 0.2, 0.4, 0.3]) == pytest.approx(0.8)
    assert spearman([1.0, 1.0, 2.0], [3.0, 3.0, 7.0]) == pytest.approx(1.0)
    assert spearman([1.0, 1.0], [2.0, 3.0]) is None and spearman([1.0], [1.0]) is None


def test_choices_are_what_a_backward_can_be():
    assert len(set(choices())) == len(choices()) == 25 + 3 * 16
    assert [choice.name for choice in choices() if choice.backward is None] == [
        "delayed",
        "current",
        "rowwise",
        "block",
    ]
    assert all("delayed" not in list(by_gemm(choice).values())[1:] for choice in choices() if choice.name != "delayed")
    assert by_gemm(None) == dict.fromkeys(("fprop", "dgrad", "wgrad"), "high_precision")


WIDE = 1536


class Layers(nn.Module):
    """Two layers, and a head. The second has an input whose first row is 300,000 times as large as the others."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.plain, self.planted, self.head = nn.Linear(wide, wide), nn.Linear(wide, wide), nn.Linear(wide, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.plain(x))
        factor = torch.ones(x.shape[0], 1, device=x.device)
        factor[0] = 3e5
        return self.head(torch.tanh(self.planted(x * factor)))


STEP = torch.empty(32768, WIDE, device="meta")


def batches(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(16, WIDE) for _ in range(count)]


@pytest.fixture(scope="module")
def found() -> tuple[Layers, Calibration]:
    model = Layers()
    return model, calibrate(model, batches(), 1.06, step=STEP, target="h100", check=True)


def test_an_outlier_is_moved_off_scales_of_tensors(found):
    model, calibration = found
    layers = {layer.fqn: layer for layer in calibration.layers}
    assert list(layers) == ["plain", "planted"]  # the head is too narrow for any
    lost = layers["planted"].lost["fprop"]
    assert min(lost["delayed"], lost["current"]) > 20 * max(lost["rowwise"], lost["block"])
    chosen = calibration.chosen(layers["planted"])
    assert chosen["fprop"] in ("rowwise", "block", "high_precision"), chosen
    assert "loses less" in layers["planted"].why
    alike = layers["plain"].lost["fprop"]
    assert max(alike.values()) < 1.5 * min(alike.values())
    assert layers["planted"].sensitivity > layers["plain"].sensitivity and calibration.rank_correlation > 0.99
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_budget_is_kept_and_more_of_it_loses_less(found):
    model, calibration = found
    assert calibration.fastest_s <= calibration.step_s <= 1.06 * calibration.fastest_s * (1 + 1e-9) < calibration.high_s

    def of(budget: float) -> Calibration:
        return calibrate(model, batches(1), budget, step=STEP, target="h100")

    fastest, most = of(1.0), of(float("inf"))
    assert fastest.step_s == fastest.fastest_s == pytest.approx(calibration.fastest_s)
    assert {layer.why for layer in fastest.layers} == {"the fastest"}
    assert set(most.values()) == {"none"} and most.step_s == pytest.approx(most.high_s)


def test_what_was_promised_is_what_is_compiled(found):
    model, calibration = found
    report = explain(model, batches()[0], options={"policy": calibration})
    promised = {
        (layer.fqn, gemm): name for layer in calibration.layers for gemm, name in calibration.chosen(layer).items()
    }
    sites = {(site.fqn, site.gemm): site for site in report.sites if site.fqn != "head"}
    assert report.unused_policy == [] and sites
    for key, site in sites.items():
        low = promised[key] != "high_precision"
        assert site.recipe == (promised[key] if low or calibration[key[0]] != "none" else "none"), key
        assert (site.kernel != "high_precision") == low and site.reason is None


def test_a_file(found, tmp_path):
    _, calibration = found
    path = calibration.save(tmp_path / "policy.json")
    loaded = Calibration.load(path)
    assert dict(loaded) == dict(calibration) and list(loaded) == list(calibration)
    assert loaded.save(tmp_path / "again.json").read_text() == path.read_text()
    assert loaded.table(columns=200) == Calibration.load(tmp_path / "again.json").table(columns=200)
    edited = json.loads(path.read_text())
    edited["policy"]["plain"] = {"recipe": "rowwise", "backward": {"wgrad": "block"}}
    path.write_text(json.dumps(edited))
    assert Calibration.load(path)["plain"] == recipes.Float8RowwiseScaling(backward={"wgrad": "block"})
    for text in ("[]", "{}", '{"format": 2}', "no", json.dumps({**edited, "policy": {"plain": "rowise"}})):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"is no calibration .* expected what Calibration.save wrote"):
            Calibration.load(path)


def test_how_it_is_shown(found):
    _, calibration = found
    text = calibration.table(columns=260)
    for part in (
        "1 of 2 layers in low precision",
        "NVIDIA H100",
        "of 1.06 allowed",
        "rank correlation",
        "planted",
        "why",
    ):
        assert part in text
    assert max(map(len, calibration.table(columns=90).split("\n"))) <= 90
    assert len(repr(calibration)) < 200 and "\n" not in repr(calibration)
    shown = calibration._repr_html_()
    assert shown.startswith("<div>") and "<table>" in shown and "<html" not in shown


def test_delayed_scaling_is_measured_by_the_batches_before(found):
    """A batch 64 times as large as those before is cut off; the first is cast by its own amaxes. The weight's gradient
    shows it: behind the forward's product such large values have no gradient."""
    model, _ = found
    x = torch.randn(16, WIDE)

    def lost(*given: torch.Tensor) -> dict[str, float]:
        calibration = calibrate(model, given, 1.0, step=STEP, target="h100")
        [layer] = [layer for layer in calibration.layers if layer.fqn == "plain"]
        return layer.lost["wgrad"]

    alone, larger = lost(x), lost(x, 64 * x)
    assert alone["delayed"] == pytest.approx(alone["current"], rel=0.01)
    assert larger["delayed"] > 10 * larger["current"]


class Scaled(nn.Module):
    """Layers side by side, the first of whose outputs reaches the loss a thousandth as far, the second's not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.faint, self.cut, self.loud = (nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-3 * self.faint(x).cos() + self.cut(x).detach() + self.loud(x).cos()


def test_errors_count_as_far_as_the_loss_feels_them():
    calibration = calibrate(Scaled(), batches(), 1.03, step=STEP, target="h100", check=True)
    weight = {layer.fqn: layer.weight for layer in calibration.layers}
    assert weight["cut"] == 1.0  # has no gradient
    assert weight["loud"] / weight["faint"] == pytest.approx(1e6, rel=0.5)
    moves = {layer.fqn: layer.sensitivity for layer in calibration.layers}
    assert moves["loud"] > 50 * moves["faint"]


def test_layers_of_the_users_policy_are_left_to_it(found):
    model, _ = found
    mine = {"planted": "rowwise"}
    calibration = calibrate(model, batches(1), step=STEP, target="h100", options={"policy": mine})
    assert list(calibration) == ["plain"] and list({**mine, **calibration}) == ["planted", "plain"]


class Shared(nn.Module):
    """q and k have one input; `again` is called with two."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.again = (nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.q(x) + self.k(x))) + self.again(x.sigmoid())


def test_layers_that_share_an_input_or_a_module_have_one_choice():
    calibration = calibrate(Shared(), batches(1), 1.05, step=STEP, target="h100")
    beside = {layer.fqn: layer.beside for layer in calibration.layers}
    assert beside == {"q": ("q", "k"), "k": ("q", "k"), "again": ("again",)}
    assert calibration["q"] == calibration["k"]
    times = {layer.fqn: layer.time_s["none"] for layer in calibration.layers}
    assert times["again"] == pytest.approx(times["q"] * 5 / 4)  # of two calls, one with a dgrad; of q and k


def test_layers_that_are_too_small_say_so():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    calibration = calibrate(model, [torch.randn(32, 256)], target="h100")
    assert set(calibration.values()) == {"none"} and calibration.step_s == calibration.high_s
    assert all("too small for FP8 to pay" in layer.why for layer in calibration.layers)


class Outer(nn.Linear):
    """A layer that holds another one."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)
        self.inner = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(super().forward(x)))


def test_globs_name_one_layer_each():
    for path in ("a.b", "a[0]", "what?", "a*"):
        policy = te_inductor.passes.pre_grad.decide.policy.Policy([(glob_of(path), "current")])
        assert policy.first((path,), (1, 1, 1)) and not policy.first((path.replace(path[1], "x"),), (1, 1, 1))
    model = nn.Sequential(Outer())
    assert list(calibrate(model, batches(1), step=STEP, target="h100")) == ["0.inner", "0"]


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_every_choice_trains(name, without_tracing):
    """What a policy may hold compiles and trains."""
    found = [choice for choice in choices() if choice.name == name]
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in found))
    policy = {str(place): choice for place, choice in enumerate(found)}
    compiled = torch.compile(copy.deepcopy(model), backend="te", options={"policy": policy, "fallback": "error"})
    for _ in range(2):
        compiled(torch.randn(32, 128)).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in compiled.parameters())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budget": 0.9}, r"budget is 0.9, expected a multiple of the fastest choice's time"),
        ({"budget": True}, r"budget is True"),
        ({"batches": []}, r"batches is empty, expected the arguments of at least one call"),
        ({"target": None}, r"no layer could be timed on cpu, expected a device whose GEMMs were timed"),
        ({"target": "b200"}, r"no layer could be timed on NVIDIA B200"),
        ({"target": "h1000"}, r"unknown target 'h1000'"),
        ({"options": {"recipe": "block"}}, r"calibrate was given option 'recipe', expected none"),
        ({"loss": 0.5}, r"loss is a float \(0.5\), expected a function"),
    ],
)
def test_what_is_refused(given, text):
    arguments = {"batches": [torch.randn(16, 64)], "target": "h100", **given}
    with pytest.raises(OptionError, match=text):
        calibrate(nn.Linear(64, 64), **arguments)


def test_a_model_without_numbers_is_refused():
    with pytest.raises(OptionError, match="the model is on the meta device, which holds no numbers"):
        calibrate(nn.Linear(64, 64, device="meta"), [torch.empty(4, 64, device="meta")], target="h100")
