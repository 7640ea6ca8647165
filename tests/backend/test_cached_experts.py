"""Experts' weights that are cast once: what casting them at each call computes, bit for bit, and no more experts are cast
again than have changed. Linear layers are in test_cached_weights.py, which also has every way to change a weight."""

import pytest
import torch

from te_inductor import explain
from tests.experts import EXPERTS, HIDDEN, MoE
from tests.support.cached_weights import Pair

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")
pytest.importorskip("transformers")  # whose op multiplies in fp32 where code is compiled

ROUTER = {"*gate": "none"}


def batch(rows=24):
    return torch.randn(rows, HIDDEN, requires_grad=True)


def pair_of(recipe, dtype=torch.float32, **more):
    return Pair(MoE(**more).to(dtype), recipe=recipe, policy=ROUTER)


@pytest.mark.parametrize(
    ("recipe", "form", "split"),
    [
        ("current", "transpose", True),
        ("rowwise", "direct", False),
        ("delayed", "transpose", True),
        pytest.param("mxfp8", "transpose", False, marks=pytest.mark.thorough),
        pytest.param("current", "direct", False, marks=pytest.mark.thorough),
        pytest.param("rowwise", "cast", False, marks=pytest.mark.thorough),
        pytest.param("delayed", "direct", False, marks=pytest.mark.thorough),
        pytest.param("mxfp4", "direct", False, marks=pytest.mark.thorough),
    ],
)
def test_accumulation(recipe, form, split, casts):
    """Two microbatches a step: each expert of each weight is cast once a step, and one that has not changed not at
    all."""
    pair = pair_of(recipe, form=form, split=split)
    for step in range(2):
        for _ in range(2):
            pair.backward(pair(batch()))
        made, once = len(casts), 2 * EXPERTS
        if recipe != "delayed":  # whose scales change with the weights' amaxes, too
            assert made == (once if step == 0 else 2)
        casts.clear()
        for model in pair.models:  # one expert of each of two weights
            with torch.no_grad():
                model.experts.down_proj[1].mul_(1.5)
                (model.experts.w3 if split else model.experts.gate_up_proj)[-1, 3, 5] += 1
            model.zero_grad()


def test_blocks(casts):
    """Each expert has blocks of its own; two weights of one GEMM stand one below the other."""
    from tests.experts import Experts

    experts = Experts(split=True, inner=128)
    for name, shape in (("w1", (4, 128, 128)), ("w3", (4, 128, 128)), ("down_proj", (4, 128, 128))):
        setattr(experts, name, torch.nn.Parameter(torch.randn(shape) / 11))
    ends = torch.tensor([0, 17, 40, 48], dtype=torch.int32)
    pair = Pair(experts, recipe="block", fallback="error")
    pair.runs = [lambda x, run=run: run(x, ends) for run in pair.runs]
    for _ in range(2):
        pair.backward(pair(torch.randn(48, 128, requires_grad=True)))
    assert len(casts) == 2 * EXPERTS and len({one.shape for one in casts}) == 2


@pytest.mark.thorough
def test_inference_and_training(casts):
    """Row copies alone; training behind it adds the columns."""
    pair = pair_of("rowwise")
    with torch.no_grad():
        pair(batch())
    assert len(casts) == 2 * EXPERTS and all(kept.data_t is None for kept in casts)
    pair.backward(pair(batch()))
    assert len(casts) == 4 * EXPERTS and all(kept.data_t is not None for kept in casts[-2 * EXPERTS :])
    assert {kept.shape for kept in casts} == {(96, 32), (32, 48)}


@pytest.mark.thorough
def test_values_that_are_no_numbers(casts):
    """NaN and infinity stay with their expert."""
    pair = pair_of("current")
    for value in (torch.nan, torch.inf, 0.0):
        for model in pair.models:
            model.experts.down_proj.data[2] = value
        x = batch()
        a, b = (run(x) for run in pair.runs)
        assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) and a.isfinite().any()


def test_what_is_refused():
    def reasons(model, **options):
        report = explain(model, batch(), options={"policy": ROUTER, "weights": "once", **options})
        return {one.fqn: one.reason for one in report.unmet if one.option == "weights"}

    assert set(reasons(MoE(), recipe="nvfp4").values()) == {
        "copies of experts' weights are not kept where all experts share one level of their scales"
    }
    beside = reasons(MoE(form="direct", split=True), recipe="current")
    assert set(beside) == {"experts.w1", "experts.w3"} and "stand beside each other" in beside["experts.w1"]
    assert not reasons(MoE(), recipe="rowwise")
