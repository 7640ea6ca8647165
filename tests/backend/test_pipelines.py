"""Weight gradients that a schedule of torch.distributed.pipelining asks for in its idle time, on two and four ranks."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from te_inductor.compat import in_metadata_inference, wrappers
from tests.ranks import ranks

thorough = pytest.mark.thorough
STEPS = 3
INFERENCE = "_forward_metadata_inference"
# torch 2.11 begins by sends of a rank to itself where it has both stages, which gloo refuses.
V_SHAPED = "ZBVZeroBubble" if hasattr(PipelineStage, INFERENCE) else "Interleaved1F1B"
CASES = [
    (2, f"trains {V_SHAPED} current"),
    pytest.param(2, f"compiled trains {V_SHAPED} current", marks=thorough),
    pytest.param(2, "compiled trains Interleaved1F1B rowwise", marks=thorough),
    pytest.param(4, f"compiled trains {V_SHAPED} rowwise", marks=thorough),
    pytest.param(4, "compiled trains Interleaved1F1B current", marks=thorough),
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_losses_are_those_of_one_rank(world, case):
    """Bit for bit, and so are the parameters: each adds up what its microbatches leave in the same order."""
    told = ranks("tests.backend.pipeline_ranks", world, case)[case]
    last = [rank for rank in told if any(rank["losses"])]
    assert len(last) == 1 and last[0]["losses"] == last[0]["alone"]
    for rank in told:
        assert rank["apart"] == 0.0
        assert rank["ran"] == 2 * 2 * 2 * world * STEPS  # two stages of two layers; microbatches


def test_delayed_scaling_observes_microbatches_alone():
    """A stage that torch runs to find its shapes, on memory that nothing was written to and with a backward of ones, leaves
    nothing in a history. A schedule has other forwards before the first backward, so that they are cast otherwise."""
    for found, alone in ranks("tests.backend.pipeline_ranks", 2, "observes")["observes"]:
        for amaxes, expected in zip(found, alone, strict=True):
            assert len(amaxes) == 4 and max(amaxes) == pytest.approx(max(expected), rel=0.1)


def test_replicas_of_a_stage_in_ddp_have_one_scale():
    """Each microbatch is a step, although torch's schedules run all forwards in `no_sync()`."""
    told = ranks("tests.backend.pipeline_ranks", 4, "replicated")["replicated"]
    largest = max(amax for _, amax in told)
    for place in range(2):
        (state, _), (other, _) = told[2 * place : 2 * place + 2]
        assert state == other
        for key, value in state.items():
            assert value != 1.0 if key.endswith(".scale") else sum(amax > 0 for amax in value) == 2 * 4
    assert max(told[0][0]["up.input.amax_history"]) == pytest.approx(largest, rel=1e-6)


@pytest.mark.skipif(not hasattr(PipelineStage, INFERENCE), reason="before 2.13 it runs on `meta`")
def test_a_run_for_shapes_is_told_from_others(monkeypatch):
    """The one in which it is asked first began before anything counts them."""
    monkeypatch.setattr(PipelineStage, INFERENCE, inspect.unwrap(getattr(PipelineStage, INFERENCE)))
    monkeypatch.setattr(wrappers, "_inferences", wrappers._Inferences())
    wrappers._tell_inferences.cache_clear()
    told = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: told.append(in_metadata_inference()))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stage = PipelineStage(module, 0, 1, torch.device("cpu"))
        for _ in range(2):
            stage._forward_metadata_inference((torch.ones(2),))
            module(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()
        wrappers._tell_inferences.cache_clear()
    assert told == [True, False, True, False] and wrappers._inferences.are_told
