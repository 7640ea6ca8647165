"""What outlives a step lies outside of the memory that a CUDA graph's replays write, and is let go of with its
model."""

import gc

import pytest
import torch
from torch import Tensor, nn

from te_inductor.runtime import cached_weights, state

OPTIONS = {
    "delayed": {"recipe": "delayed"},
    "kept": {"recipe": "current", "weights": "once"},
    "kept, delayed": {"recipe": "delayed", "weights": "once"},
    "main_grad": {"recipe": "current", "wgrad": "main_grad"},
}
every_state = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def trained(options: dict) -> nn.Module:
    """A model behind four steps, the last of which are replays."""
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    policy = {"*": options["recipe"]}  # which the size rule does not overrule
    run = torch.compile(model, backend="te", options={"mode": "reduce-overhead", "policy": policy, **options})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        run(torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
    model.zero_grad()  # gradients lie in the graph's memory
    return model


def lasting(model: nn.Module) -> list[Tensor]:
    """Everything of ours that the next step reads."""
    found = []
    for parameter in model.parameters():
        found += [getattr(parameter, "main_grad", parameter)]
        found += [t for one in state._states.get(parameter, {}).values() for t in one.tensors().values()]
        for kept in (kept for owned in cached_weights._kept.values(parameter) for kept in owned.values()):
            found += [*kept.tensors, kept.seen]
    return found


@every_state
def test_nothing_that_outlives_a_step_is_in_a_graphs_pool(options):
    model = trained(options)
    segments = torch.cuda.memory_snapshot()
    pools = [(s["address"], s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    tensors = lasting(model)
    assert pools and (len(tensors) > 4 or "wgrad" in options)
    for tensor in tensors:
        assert not any(0 <= tensor.data_ptr() - start < size for start, size in pools), tuple(tensor.shape)


@every_state
def test_a_model_that_is_gone_leaves_no_memory(options):
    left = []
    for _ in range(3):  # libraries keep workspaces from the first on
        model = trained(options)
        del model
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert left[2] == left[1]
