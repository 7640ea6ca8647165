"""Note [Scales that do not suit] in runtime/state/misfits.py: amaxes far from their histories are counted."""

import math
import re
import warnings

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.errors import FallbackWarning
from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.eager import delayed
from te_inductor.runtime.state import misfits
from te_inductor.runtime.state.misfits import Misfits, Watch
from tests.backend.delayed_programs import te

pytestmark = pytest.mark.usefixtures("without_tracing")
LINE = re.compile(
    r"steps: (?:(\d+) tensors, the worst of them )?(\S+), from its step (\d+) on: values were cut off in (\d+) and digits"
    r" lost in (\d+) of (\d+) steps(?:, its amax at most (\S+) times)?"
)


def said_of(run, model, batches, weights=None):
    """What is said in steps of training, and before which of them."""
    found = []
    for step, x in enumerate(batches):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.zero_grad()
            run(x).square().mean().backward()
        texts = [(step, one) for one in caught if "scales that did not suit" in str(one.message)]
        assert all(one.category is FallbackWarning for _, one in texts)
        found += [(step, *LINE.search(str(one.message)).groups()) for step, one in texts]
    return found


def outlier(x):
    x = x.clone()
    x[0] = 1e30
    return x


def test_an_outlier_and_what_it_leaves_behind():
    """Its own step cuts it off, and is named by the next call. Nothing more is said of the steps behind it."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    run = te(model, fallback="warn")
    said = said_of(run, model, [x] * 4 + [outlier(x)] + [x] * 3)
    [(step, many, name, *counts, excess)] = said
    assert (step, many, name) == (5, None, "0.input")  # whose product, of what was cut, is cut a little itself
    assert tuple(map(int, counts)) == (5, 1, 0, 5) and float(excess) > 1e28


def test_a_batch_of_one_token_behind_batches_of_many():
    """The loss is a mean: its gradients are as many times larger."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    run = te(model, fallback="error")
    said = said_of(run, model, [*torch.randn(4, 128, 64), torch.randn(1, 64), torch.randn(128, 64)])
    [(step, _, name, *_)] = said
    assert step == 5 and name in ("0.grad_output", "1.grad_output")


@pytest.mark.parametrize("how", ["ordinary", "silent", "without gradients"])
def test_nothing_is_said(how):
    """Nothing is said of ordinary training, of what nobody wants to hear, and where nothing is recorded."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    run = te(model, recipe=DelayedScaling(), fallback="silent" if how == "silent" else "error")
    if how == "ordinary":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for x in torch.randn(20, 64, 64):
            assert said_of(run, model, [x]) == []
            optimizer.step()
        return
    x = torch.randn(64, 64)
    assert said_of(run, model, [x] * 3 + [outlier(x)] * (how == "silent") + [x] * 2) == []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (outlier(x), x):
            run(each)


def test_counts_outlive_what_is_loaded():
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    run = te(model, fallback="warn")
    assert said_of(run, model, [x] * 3) == []
    te_inductor.load_state_dict(model, te_inductor.state_dict(model))
    [(_, many, name, *counts, excess)] = said_of(run, model, [1000 * x, x])
    assert (many, name, *counts) == (None, "(root).input", "4", "1", "0", "4") and float(excess) == pytest.approx(
        1e3, 0.1
    )


def test_what_counts():
    """The element's range decides; what is no observation does not count, nor does a step that casts by own amaxes."""
    cases = {  # amax times scale: cut, lost
        448.0: (0, 0), 896.0: (0, 0), 897.0: (1, 0), torch.inf: (0, 0), torch.nan: (0, 0), 0.0: (0, 0), 0.125: (0, 0),
        0.124: (0, 1), 2.0**-140: (0, 1),
    }  # fmt: skip
    counts = torch.zeros(len(cases), misfits.COUNTS, dtype=torch.int32)
    for own in (True, False, False):
        states = [torch.tensor([amax, 0.0, 0.0, 0.0, 1.0]) for amax in cases]
        delayed.update_scales(states, ScaleUpdate(DelayedScaling(amax_history_len=4), "e4m3"), misfits=counts, own=own)
    expected = [[3, 2 * cut, 2 * lost, 0] for cut, lost in cases.values()]
    assert counts[:, :4].tolist() == expected
    peaks = [Misfits(*row).highest for row in counts.tolist()]
    assert peaks == pytest.approx([max(amax, 2.0**-126) if 0 < amax < math.inf else 0 for amax in cases])
    assert counts[:, 4].tolist() == [3 * (not math.isfinite(amax)) for amax in cases]
    assert not counts[:, 5].any()  # a scale of 1 is none to jump from


ORDINARY = [1.0] * 24  # amaxes
PROGRAMS = {  # amaxes of steps, and the step in which harm begins, and that in which it is known; 0: never
    "a planted outlier": ([*ORDINARY, 1e30, *ORDINARY], 25, 25),
    "another, in the first steps": ([1.0, 1e30, *ORDINARY], 2, 2),
    "a jump that stays": ([*ORDINARY, *[20.0] * 8], 25, 25),
    "a layer that drifts": ([*ORDINARY, *[3.0**step for step in range(1, 30)]], 25, 40),
    "one that drifts fast": ([*ORDINARY, *[5.0**step for step in range(1, 9)]], 25, 28),
    "a stale scale, as gradients have become small": ([*ORDINARY, *[1e-4] * 30], 25, 40),
    "a magnitude that alternates": ([*ORDINARY, *[1.0, 1e-4] * 40], 26, 58),
    "a batch 64 times as small": ([*ORDINARY, 64.0], 25, 25),
    "a model that warms up": ([1.0, 2.5, 3.0, 8.0, 9.0, 9.5, 21.0, *[20.0] * 20], 0, 0),
    "a weight that starts at 0": ([0.0, *[step * (step + 1) / 2 for step in range(1, 40)]], 0, 0),
    "a gradient behind two of them": ([0.0, *[(step * (step + 1) / 2) ** 2 for step in range(1, 40)]], 0, 0),
    "a rate that is raised by tens": ([*ORDINARY, 2.0, *[4.0] * 9, 10.0, *ORDINARY], 0, 0),
    "a spike of the loss": ([*ORDINARY, 4.0, 14.0, 5.0, *ORDINARY], 0, 0),
    "spikes far apart": ([*ORDINARY, 10.0, *[1.0] * 100, 30.0, *[1.0] * 100, 100.0], 0, 0),
    "decay": ([2.0 ** -(step / 4) for step in range(48)], 0, 0),
    "steps without gradient": ([*ORDINARY, *[0.0, math.nan, math.inf] * 9], 0, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_does_harm(name):
    """It is known in the step in which so much is lost, and says since when."""
    amaxes, began, known = PROGRAMS[name]
    update, counts = ScaleUpdate(DelayedScaling(), "e4m3"), torch.zeros(1, misfits.COUNTS, dtype=torch.int32)
    state = torch.tensor([*[0.0] * 1024, 1.0])
    found = []
    for step, amax in enumerate(amaxes):
        own = not state[:-1].any()
        state[0] = amax
        delayed.update_scales([state], update, misfits=counts, own=own)
        first = Misfits(*counts[0].tolist()).first
        found += [(first, step + 1)] * (first > 0 and not found)
    assert found == ([(began, known)] if known else [])


def test_blocks_that_are_compiled_one_by_one_share_a_warning():
    """What is said first counts the tensors of all of them."""
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    runs, x = [te(block, fallback="warn") for block in blocks], torch.randn(32, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(7):
            for run in runs:
                run(1e20 * x if step == 4 else x).square().mean().backward()
    texts = [str(one.message) for one in caught if "scales that did not suit" in str(one.message)]
    assert len(texts) == 1 and LINE.search(texts[0])[1] == "3", texts


@pytest.mark.parametrize(("amax", "jumps"), [(1.0, 0), (15.9, 0), (16.1, 1), (1 / 15.9, 0), (1 / 16.1, 1)])
def test_a_scale_that_jumps(amax, jumps):
    recipe, counts = DelayedScaling(amax_compute_algo="most_recent"), torch.zeros(1, misfits.COUNTS, dtype=torch.int32)
    state = torch.tensor([amax, *[0.0] * (recipe.amax_history_len - 1), 448.0])
    delayed.update_scales([state], ScaleUpdate(recipe, "e4m3"), misfits=counts)
    assert Misfits(*counts[0].tolist()).jumps == jumps


def test_the_host_does_not_wait(monkeypatch):
    """The host does not wait for a copy that is on its way, behind which it asks for no other; and it asks ever less
    often."""
    arrived, copies = [False], []

    class Event:
        def query(self):
            return arrived[0]

    monkeypatch.setattr(misfits, "_behind", lambda tensor: (copies.append(tensor), Event())[1])
    watch = Watch([torch.tensor([[5, 1, 0, 4, *[0] * 8]], dtype=torch.int32)])
    assert [watch.look() for _ in range(3)] == [None] * 3 and len(copies) == 1
    arrived[0] = True
    assert watch.look() == [Misfits(steps=5, cut=1, coarse=0, first=4)]
    looks = [watch.look() is not None for _ in range(96)]
    assert sum(looks) == 12 + 5 and len(copies) == 1 + 12 + 5
