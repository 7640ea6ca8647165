"""A layer of experts on a GPU: against high precision, without a word to the host, replayed with other groups."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.gpu_experts import DIM, HIDDEN, RECIPES, Experts, chosen_by, compiled, inputs, step

LOSS = {"nvfp4": 0.35}  # of the norm, of outputs and gradients; FP8's is 0.12


def assert_near(found: list[Tensor], expected: list[Tensor], recipe: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one - other).float().norm() <= LOSS.get(recipe, 0.12) * other.float().norm()


@pytest.mark.parametrize("kind", ["all", "some", "one"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_and_its_gradients(recipe, kind):
    model = Experts()
    given = inputs(kind)
    dy = torch.randn_like(given[0])
    assert_near(step(compiled(model, recipe), model, *given, dy), step(model, model, *given, dy), recipe)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_sizes_of_no_tile(recipe):
    """The sizes are like gpt-oss's, 2880 = 22.5 x 128, the parameter as it uses it."""
    model = Experts(dim=720, hidden=336, transposed=True)
    given = inputs("all", 720)
    dy = torch.randn_like(given[0])
    assert_near(step(compiled(model, recipe), model, *given, dy), step(model, model, *given, dy), recipe)


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_the_host_is_not_asked(recipe):
    model = Experts()
    run, given = compiled(model, recipe), inputs()
    dy = torch.randn_like(given[0])
    for _ in range(3):  # delayed scaling's history is looked at in the second
        run(*given).backward(dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*given).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_replays_with_other_groups(recipe):
    model = Experts()
    counters.clear()
    run = compiled(model, recipe, mode="reduce-overhead")
    x, chosen, weights = inputs()
    dy = torch.randn_like(x)
    for kind in ("all", "all", "all", "some", "one", "all"):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            chosen.copy_(chosen_by(kind))
            x.copy_(torch.randn_like(x))
        assert_near(step(run, model, x, chosen, weights, dy), step(model, model, x, chosen, weights, dy), recipe)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("recipe", RECIPES[:4])
@pytest.mark.parametrize("wgrad", ["main_grad", "deferred"])
def test_gradients_that_go_elsewhere(recipe, wgrad):
    from te_inductor import backward_dw

    model, other = Experts(), Experts()
    other.load_state_dict(model.state_dict())
    given = inputs()
    dy = torch.randn_like(given[0])
    expected = step(compiled(other, recipe), other, *given, dy)[2:]
    if wgrad == "main_grad":
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    compiled(model, recipe, wgrad=wgrad)(*given).backward(dy)
    if wgrad == "deferred":
        assert backward_dw(model) == 2
    found = [p.main_grad if wgrad == "main_grad" else p.grad for p in model.parameters()]
    for one, gradient in zip(found, expected, strict=True):
        assert (one - gradient).float().norm() <= 2**-8 * gradient.float().norm()


def test_rows_of_no_expert():
    """Poisoned, as expert parallelism leaves them: they change nothing, and have no gradient."""
    model = Experts()
    rows, ends = 64, torch.tensor([3, 3, 20, 21, 30, 40, 40, 50], dtype=torch.int32, device="cuda")
    x = torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16)

    def product(x: Tensor) -> Tensor:
        return F.grouped_mm(x, model.gate_up.transpose(-2, -1), offs=ends)

    run = torch.compile(product, backend="te", fullgraph=True, options={"policy": {"*": "current"}})
    poisoned = x.clone()
    poisoned[50:] = torch.nan
    dy = torch.randn(rows, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    dy[50:] = torch.inf
    found = []
    for one in (x, poisoned):
        model.zero_grad()
        one.requires_grad_()
        y = run(one)
        y.backward(dy)
        assert not y[50:].any() and not one.grad[50:].any()
        found.append([y.detach(), one.grad, model.gate_up.grad.clone()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_rows_of_no_expert_behind_swiglu(recipe):
    """Both halves of the gradient are cast apart: what lies behind the last group, in x and in the gradient, is in none
    of them, nor in an amax that a later step is cast with."""
    model, ends = Experts(), torch.tensor([3, 3, 20, 21, 30, 40, 40, 50], dtype=torch.int32, device="cuda")
    x, dy = (torch.randn(64, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def layers(x: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, model.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, model.down.transpose(-2, -1), offs=ends)

    found = []
    for poison in (0.0, torch.nan, torch.inf):
        torch.compiler.reset()  # delayed scaling begins anew
        run = torch.compile(layers, backend="te", fullgraph=True, options={"policy": {"*": recipe}})
        given, gradient = x.clone(), dy.clone()
        given[50:], gradient[50:] = poison, poison
        given.requires_grad_()
        for _ in range(3):
            model.zero_grad()
            given.grad = None
            y = run(given)
            y.backward(gradient)
        found.append([y.detach(), given.grad, *(p.grad.clone() for p in model.parameters())])
    for results in zip(*found, strict=True):
        assert results[0].isfinite().all() and all(torch.equal(one, results[0]) for one in results[1:])


@pytest.mark.parametrize("kind", ["all", "some", "one"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_order_of_tokens(recipe, kind, monkeypatch):
    """Gradients that are computed in the order of tokens and cast in pieces are those of the order of experts, up to
    roundings to bf16 in front of a cast: of E5M2's values one in 64 becomes its neighbour, a quarter away, and
    sqrt(1 / 64) / 4 = 2^-5."""
    from te_inductor.passes import joint
    from te_inductor.passes.joint import concatenations, token_order
    from tests.passes import leave_out

    model, given = Experts(), inputs(kind)
    x, chosen, weights = given[0], given[1], given[2].requires_grad_()
    dy, found = torch.randn_like(x), []
    for plain in (True, False):
        torch.compiler.reset()
        with monkeypatch.context() as patch, torch.compiler.config.patch(force_disable_caches=True):
            for one in (token_order.compute, concatenations.cast_pieces) if plain else ():
                leave_out(patch, joint, one)
            run = compiled(model, recipe)
            for _ in range(2):  # a first step, and one with known scales
                weights.grad = None
                results = [*step(run, model, x, chosen, weights, dy), weights.grad.clone()]
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all() and (one - other).float().norm() <= 2**-5 * other.float().norm()
