"""What outlives a step lies outside of the memory that a CUDA graph's replays write, and is let go of with its
model. Replays are seen to run in low precision, and asking that changes nothing."""

import functools
import gc

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager

from te_inductor import assert_low_precision
from te_inductor.errors import FallbackError
from te_inductor.runtime.state import store
from te_inductor.runtime.weights import cached_weights

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
        found += [one.tensor for one in store._states.get(parameter, {}).values()]
        for kept in (kept for owned in cached_weights._cached.values(parameter) for kept in owned.values()):
            found += [*kept.tensors, kept.digests]
    return found


class Broken(nn.Module):
    """Its head runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.head = nn.Linear(128, 64)

    def forward(self, x):
        return skipped(self.head, self.body(x))


@torch._dynamo.disable
def skipped(layer, x):
    return layer(x)


def replayed(model: nn.Module, recipe: str):
    options = {"mode": "reduce-overhead", "policy": {"*": recipe}, "recipe": recipe, "fallback": "silent"}
    return torch.compile(model.cuda().bfloat16(), backend="te", options=options)


def steps(recipe: str, asked: str, marked: bool) -> list[Tensor]:
    """Gradients of nine steps, in the first five of which low precision is asserted where `asked` says."""
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(5))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    run, found = replayed(model := nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), recipe), []
    recorded = []  # how many graphs, by step
    for step in range(9):

        def ask(place: str, step=step) -> None:
            if step < 5 and place == asked:
                assert_low_precision(run, x)

        model.zero_grad()
        ask("before")
        if marked:
            torch.compiler.cudagraph_mark_step_begin()
        loss = run(x).float().square().sum()
        ask("between")
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        ask("behind")
        recorded.append(str(get_manager(0).graph_counter))
    assert counters["inductor"]["cudagraph_skips"] == 0 and len(set(recorded[6:])) == 1, recorded
    return found


@functools.cache
def steps_without(recipe: str, marked: bool) -> list[Tensor]:
    return [gradient.cpu() for gradient in steps(recipe, "nowhere", marked)]


@pytest.mark.parametrize(
    ("asked", "marked"),
    [("before", True), ("between", True), ("behind", True), ("behind", False)],
    ids=["before", "between", "behind", "unmarked"],
)
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_asking_whether_it_is_low_changes_no_step(recipe, asked, marked):
    """The question comes before a step's forward, before its backward, or behind it, also where no step is marked:
    gradients are those of steps without, and later steps replay what was recorded. The second of them may yet record
    one graph: the first followed a call that asked, and the graphs behind a call are recorded by what went before
    it."""
    for actual, expected in zip(steps(recipe, asked, marked), steps_without(recipe, marked), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_low_precision_is_seen_in_each_stage_of_a_graph(recipe, grad):
    """Compiled, warmed up, recorded, replayed."""
    run, x = replayed(Broken(), recipe), torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(grad):
            report = assert_low_precision(run, x, high_precision=["head"])
        assert {site.fqn for site in report.sites if site.kernel != "high_precision"} == {"body.0", "body.2"}
    with pytest.raises(FallbackError, match=r"1 of 3 layers ran in high precision:\n.*: head\n"):
        assert_low_precision(run, x)


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
