"""Delayed scaling against the oracle: the update rule bit for bit, casts with a known scale, a layer over several
steps."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import te_inductor
from te_inductor import ops
from te_inductor.lowerings import install
from te_inductor.recipes import DelayedScaling, Format, Quantizer
from te_inductor.recipes.delayed import ScaleUpdate
from tests.bounds import assert_same_values
from tests.delayed import OracleLayer
from tests.oracle import casts
from tests.oracle.casts import ScalingHistory
from tests.support.contents import CONTENTS, SIZES


def mean_amax(history: Tensor) -> Tensor:  # (H, n)
    return history.mean(0)


def current_or_oldest(history: Tensor) -> Tensor:
    return torch.where(history[0] > 0, history[0], history[1 % len(history)])


def half_of_the_range(amax, scale, fp8_max, recipe):
    return fp8_max / amax / 2


def slow(amax, scale, fp8_max, recipe):
    """Leans on the old scale, and on the recipe."""
    return torch.minimum(scale * 2, fp8_max / amax) / 2.0**recipe.margin


def broken(amax, scale, fp8_max, recipe):
    return scale * math.nan


ALGORITHMS = ["max", "most_recent", mean_amax, current_or_oldest]
SCALINGS = [None, half_of_the_range, slow]
SPECIAL = [0.0, math.inf, math.nan, 1e-45, 1.17e-38, 1e-38, 448.0, 1.0, 3.4e38]


class Quantizers:
    """Some quantizers that are updated together, and the oracle of each."""

    def __init__(self, recipe: DelayedScaling, element: str, number: int) -> None:
        self.update = ScaleUpdate(recipe, element)
        self.oracles = [ScalingHistory(recipe, self.update.format) for _ in range(number)]
        self.states = [torch.tensor([*[0.0] * recipe.amax_history_len, 1.0]) for _ in range(number)]

    @property
    def scales(self) -> list[torch.Tensor]:
        return [state[-1] for state in self.states]

    def step(self, values: list[float], run=ops.update_scales, record=ops.record_amax) -> None:
        for value, state, oracle in zip(values, self.states, self.oracles, strict=True):
            x = torch.tensor([[-value, 0.0]])
            record([x], state)
            oracle.record(x)
        self.check()
        run(self.states, self.update)
        for oracle in self.oracles:
            oracle.update()
        self.check()

    def check(self) -> None:
        for state, oracle in zip(self.states, self.oracles, strict=True):
            (recorded, *past), (amax, *earlier, scale) = oracle.window(), state.tolist()
            assert amax == recorded or (math.isnan(amax) and math.isnan(recorded))
            assert scale == oracle.scale
            assert earlier == past


amaxes = st.one_of(st.sampled_from(SPECIAL), st.floats(0, width=32), st.floats(2**-10, 2**10, width=32))
recipes = st.builds(
    DelayedScaling,
    margin=st.sampled_from([0, 1, 7, 64]),
    amax_history_len=st.sampled_from([1, 2, 5]),
    amax_compute_algo=st.sampled_from(ALGORITHMS),
    scaling_factor_compute_algo=st.sampled_from(SCALINGS),
)


@settings(max_examples=300, deadline=None)
@given(
    recipe=recipes,
    element=st.sampled_from(["e4m3", "e5m2"]),
    steps=st.lists(st.tuples(amaxes, amaxes), min_size=1, max_size=9),
)
def test_the_update_rule(recipe, element, steps):
    state = Quantizers(recipe, element, 2)
    for values in steps:
        state.step(list(values))


@pytest.mark.parametrize("algorithm", ALGORITHMS[:3], ids=["max", "most_recent", "function"])
def test_the_update_rule_compiled(algorithm):
    """The rule runs in one graph, as it stands in a model."""
    install()
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, margin=2)
    state = Quantizers(recipe, "e4m3", 3)

    @torch.compile(backend="te", fullgraph=True)
    def run(states):
        ops.update_scales(states, state.update)

    record = torch.compile(ops.record_amax, backend="te", fullgraph=True)
    values = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (12, 3))]
    for step in torch.where(torch.rand(12, 3) < 0.5, values, torch.rand(12, 3)):
        state.step(step.tolist(), lambda states, _: run(states), record)


def scales_after(recipe: DelayedScaling, steps: list[float]) -> list[float]:
    state = Quantizers(recipe, "e4m3", 1)
    scales = []
    for value in steps:
        state.step([value])
        scales.append(state.scales[0].item())
    return scales


def test_scales_by_hand():
    """The sums need no oracle: 448 / amax over a window of 3, this step's included; 2**margin of headroom."""
    steps = [7.0, 3.5, 1.75, 1.75, 14.0]
    assert scales_after(DelayedScaling(amax_history_len=3), steps) == [64.0, 64.0, 64.0, 128.0, 32.0]
    assert scales_after(DelayedScaling(amax_history_len=1), steps) == [64.0, 128.0, 256.0, 256.0, 32.0]
    recent = DelayedScaling(amax_compute_algo="most_recent", margin=1)
    assert scales_after(recent, steps) == [32.0, 64.0, 128.0, 128.0, 16.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_what_is_no_observation_leaves_no_trace(value, algorithm):
    """What is no observation freezes no scale, and takes no place in the window: as if the step had not been."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    with_it, without = (
        scales_after(recipe, steps) for steps in ([1.0, value, 2.0, value, value, 0.5, 0.25], [1.0, 2.0, 0.5, 0.25])
    )
    assert [with_it[i] for i in (0, 2, 5, 6)] == without
    assert with_it[1] == with_it[0] and with_it[4] == with_it[3] == with_it[2]


def test_every_scale_has_a_finite_reciprocal():
    """The next step would otherwise decode with infinity, and its NaN would never observe a better amax."""
    for recipe in (DelayedScaling(margin=64), DelayedScaling(scaling_factor_compute_algo=broken)):
        [scale] = scales_after(recipe, [3e38])
        assert scale > 0 and math.isfinite(1 / torch.tensor(scale).item()) and scale >= torch.finfo(torch.float32).tiny
    assert scales_after(DelayedScaling(), [1e-45]) == [torch.finfo(torch.float32).max]


def test_a_step_records_until_it_is_updated():
    """Several microbatches, one amax: the largest."""
    amax = torch.zeros(())
    for value in (2.0, 5.0, 3.0):
        ops.record_amax([torch.tensor([[value, -value / 2]])], amax)
    assert amax.item() == 5.0


@pytest.fixture(scope="module")
def compiled():
    install()
    with torch._dynamo.config.patch(recompile_limit=1000, fail_on_recompile_limit_hit=True):
        found = (ops.record_amax, ops.quantize_delayed, ops.quantize_rowcol_delayed)
        yield {op._opname: torch.compile(op, backend="te", fullgraph=True) for op in found}


@pytest.mark.quick("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recorded_amaxes(dtype, compiled):
    for content, size in itertools.product(CONTENTS, SIZES):
        x = CONTENTS[content](*size).to(dtype)
        for record in (ops.record_amax, compiled["record_amax"]):
            for before in (0.0, 1.0, math.inf, math.nan):
                amax, oracle = torch.tensor(before), ScalingHistory(DelayedScaling(), None, recorded=before)
                record([x], amax)
                oracle.record(x)
                assert amax.item() == oracle.recorded or (amax.isnan() and math.isnan(oracle.recorded))


def test_an_empty_tensor_records_nothing():
    amax = torch.tensor(3.0)
    ops.record_amax([torch.zeros(0, 16)], amax)
    assert amax.item() == 3.0


@pytest.mark.parametrize(
    ("element", "sizes"),
    [
        ("e4m3", [(33, 70)]),
        pytest.param("e4m3", SIZES, marks=pytest.mark.thorough),
        pytest.param("e5m2", [(33, 70)], marks=pytest.mark.thorough),
    ],
)
def test_casts_with_a_known_scale(element, sizes, compiled):
    """A compile of seconds a size."""
    quantizer = Quantizer(element)
    for content, size in itertools.product(CONTENTS, sizes):
        x = CONTENTS[content](*size)
        for scale in (1.0, 2.0**-126, casts.FP32_MAX, 0.3, 448 / 3):
            known = torch.tensor(scale)
            expected, _ = casts.quantize_known(x, known.item(), quantizer)
            expected_t, _ = casts.quantize_known(x.t(), known.item(), quantizer)
            for row, rowcol in (
                (ops.quantize_delayed, ops.quantize_rowcol_delayed),
                (compiled["quantize_delayed"], compiled["quantize_rowcol_delayed"]),
            ):
                assert_same_values(row(x, known, quantizer), expected)
                data, data_t = rowcol(x, known, quantizer)
                assert_same_values(data, expected)
                assert_same_values(data_t, expected_t)
                assert data.is_contiguous() and data_t.is_contiguous() and data.dtype == quantizer.format.dtype


def steps_of(recipe, m, n, k, dtype, with_bias=True, spoil=()):
    """Training steps of one layer through the backend, each against the oracle; `spoil` maps a step to what enters
    it."""
    layer = torch.nn.Linear(k, n, bias=with_bias, dtype=dtype)
    run = torch.compile(layer, backend="te", fullgraph=True, options={"recipe": recipe, "fallback": "error"})
    oracle = OracleLayer(recipe)
    for step in range(5):
        x = (torch.randn(m, k) * 4.0 ** (step % 3)).to(dtype)
        dy = (torch.randn(m, n) * 4.0 ** -(step % 2)).to(dtype)
        for tensor, value in dict(spoil).get(step, {}).items():
            {"x": x, "dy": dy}[tensor][0, 0] = value
        x.requires_grad_()
        layer.zero_grad()
        y = run(x)
        y.backward(dy)
        bias = layer.bias.detach() if with_bias else None
        grads = [x.grad, layer.weight.grad, layer.bias.grad if with_bias else None]
        oracle.check(x.detach(), layer.weight.detach(), bias, dy, y.detach(), grads)
        oracle.check_state(te_inductor.state_dict(layer))
        with torch.no_grad():
            layer.weight -= (layer.weight.grad / 64).nan_to_num(0.0, 0.0, 0.0)


RECIPES = {
    "default": DelayedScaling(),
    "short": DelayedScaling(amax_history_len=2, margin=1),
    "current": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
    "recent": DelayedScaling(amax_compute_algo="most_recent", amax_history_len=4),
    "functions": DelayedScaling(amax_compute_algo=mean_amax, scaling_factor_compute_algo=slow, amax_history_len=3),
}


@pytest.mark.parametrize(
    ("recipe", "size", "dtype", "with_bias"),
    [
        ("short", (33, 64, 48), torch.float32, True),
        pytest.param("short", (64, 48, 128), torch.bfloat16, True, marks=pytest.mark.thorough),
        pytest.param("default", (33, 64, 48), torch.float32, True, marks=pytest.mark.thorough),
        pytest.param("current", (16, 77, 130), torch.float32, False, marks=pytest.mark.thorough),
        pytest.param("recent", (17, 77, 48), torch.bfloat16, False, marks=pytest.mark.thorough),
        pytest.param("functions", (1, 32, 48), torch.float32, True, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_steps(recipe, size, dtype, with_bias):
    steps_of(RECIPES[recipe], *size, dtype, with_bias)


@pytest.mark.parametrize("spoil", [{"x": math.nan}, {"x": math.inf}, {"dy": math.nan, "x": -math.inf}], ids=str)
def test_a_step_that_is_not_finite_spoils_no_other(spoil):
    """The later steps are the oracle's, whose scales are finite and move on. The graph is that of the test above, and
    compiled there."""
    steps_of(RECIPES["short"], 33, 64, 48, torch.float32, spoil={1: spoil})


@pytest.mark.thorough
def test_leading_dimensions_and_functions():
    """A parameter of no module; x of three dimensions."""
    weight = torch.nn.Parameter(torch.randn(32, 48))
    model = torch.nn.Module()
    model.p = weight
    run = torch.compile(F.linear, backend="te", fullgraph=True, options={"recipe": "delayed", "fallback": "error"})
    oracle = OracleLayer(DelayedScaling())
    for _ in range(2):
        x, dy = torch.randn(3, 5, 48, requires_grad=True), torch.randn(3, 5, 32)
        weight.grad = None
        y = run(x, weight)
        y.backward(dy)
        flat = [t.detach().reshape(-1, t.shape[-1]) for t in (x, dy, y, x.grad)]
        oracle.check(flat[0], weight.detach(), None, flat[1], flat[2], [flat[3], weight.grad, None])
        oracle.check_state(te_inductor.state_dict(model), "p.")


def test_numbers_of_a_tensor_of_the_program():
    """One that lies in memory as a step's scales do is read at its own places, of which some count from the end, and as the
    program has written it."""

    class Numbers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, x, boxes):
            first, last = boxes[0][0] + 1, boxes[-1][0]
            if self.training:
                boxes.mul_(16)
            return self.layer(x) * first + last

    model, x, boxes = Numbers(), torch.randn(16, 32), torch.arange(32.0).view(8, 4) + 1
    for recipe, training in itertools.product(("current", "delayed"), (True, False)):
        own, given, options = boxes.clone(), boxes.clone(), {"recipe": recipe, "policy": {"*": recipe}}
        model.train(training)
        expected = model(x, own)
        y = torch.compile(model, backend="te", options=options)(x, given)
        assert torch.equal(given, own)
        assert (y - expected).norm() < 0.1 * (expected - own[-1, 0]).norm()
