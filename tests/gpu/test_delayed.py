"""Delayed scaling on the GPU: steps against the oracle, CUDA graphs, state that moves.

The recipe comes by policy: these layers are small, and the size rule would leave them alone.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import te_inductor
from te_inductor import ops
from te_inductor.errors import FallbackWarning
from te_inductor.recipes import DelayedScaling, Quantizer
from te_inductor.runtime.state import misfits
from tests.bounds import assert_same_values
from tests.delayed import OracleLayer, check_entry, quantizers
from tests.oracle import casts
from tests.oracle.casts import ScalingHistory
from tests.support.contents import CONTENTS
from tests.support.gpu_ops import FAST_BITS

RECIPE = DelayedScaling(amax_history_len=4)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def te(model, **options):
    options = {"policy": {"*": RECIPE}, "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def tensor_core_error(result: str, k: int) -> float:
    """The error as in test_ops.py: each step of 32 products is aligned to FAST_BITS bits; fprop's running sum as
    well."""
    return 2.0**-FAST_BITS * (max(k / 32, 1) if result == "y" else 4)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Compares states wherever they are: what was loaded for quantizers that no call has made yet waits where it
    was."""
    return list(a) == list(b) and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)


def cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spoil", [{}, {"x": math.nan}, {"x": -math.inf, "dy": math.nan}], ids=str)
def test_training_steps(spoil, dtype):
    """State bit for bit, results within the GEMMs' errors; a step that is not finite leaves the later ones alone."""
    for m, n, k in [(64, 128, 256), (17, 48, 80), (100, 120, 136)]:
        torch._dynamo.reset()
        layer = nn.Linear(k, n, device="cuda", dtype=dtype)
        run, oracle = te(layer), OracleLayer(RECIPE, tensor_core_error)
        for step in range(4):
            x = (torch.randn(m, k, device="cuda") * 4.0 ** (step % 3)).to(dtype)
            dy = (torch.randn(m, n, device="cuda") * 4.0 ** -(step % 2)).to(dtype)
            for name, value in (spoil if step == 1 else {}).items():
                {"x": x, "dy": dy}[name][0, 0] = value
            x.requires_grad_()
            layer.zero_grad()
            y = run(x)
            y.backward(dy)
            grads = cpu(x.grad, layer.weight.grad, layer.bias.grad)
            x, weight, bias, dy, y = cpu(x, layer.weight, layer.bias, dy, y)
            oracle.check(x, weight, bias, dy, y, grads)
            oracle.check_state(te_inductor.state_dict(layer))


@pytest.mark.parametrize("content", CONTENTS)
def test_a_cast_that_records(content):
    """Both copies and the amax, from one read."""

    @torch.compile(backend="te", dynamic=False)
    def function(x, scale, amax):
        ops.record_amax([x], amax)
        return ops.quantize_rowcol_delayed(x, scale, Quantizer("e4m3"))

    for size in [(1, 1), (33, 70), (128, 64), (257, 1040)]:
        x, scale = CONTENTS[content](*size).to(torch.bfloat16), torch.tensor(448 / 3)
        for before in (0.0, 2.0**100, math.nan):
            amax = torch.tensor(before, device="cuda")
            data, data_t = function(x.cuda(), scale.cuda(), amax)
            assert_same_values(data.cpu(), casts.quantize_known(x, scale.item(), Quantizer("e4m3"))[0])
            assert_same_values(data_t.cpu(), casts.quantize_known(x.t(), scale.item(), Quantizer("e4m3"))[0])
            oracle = ScalingHistory(RECIPE, Quantizer("e4m3").format, recorded=before)
            oracle.record(x)
            assert amax.item() == oracle.recorded or (amax.isnan() and math.isnan(oracle.recorded))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda().bfloat16()


def steps(model: nn.Module, run, number: int = 6) -> dict[str, Tensor]:
    """Train on data of its own magnitude each step, then infer; the state after all."""
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(number):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()  # gradients lie in the graph's memory: none may live into the next step
        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, generator=generator) * 2.0**step
        run(x).float().square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0625)
    trained = te_inductor.state_dict(model)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
            y, high = run(x).clone(), model(x)
            assert (y - high).norm() < 0.1 * high.norm()
    assert same(te_inductor.state_dict(model), trained)
    return trained


def test_cuda_graphs_leave_the_state_that_eager_replays_leave():
    """Warm-up, recording and replays each count once, and nothing is skipped; inference changes nothing."""
    counters.clear()
    first = mlp()
    second = copy.deepcopy(first)
    oracle = quantizers(RECIPE)
    generator = torch.Generator("cuda").manual_seed(1)
    weight = first[0].weight.detach().clone()
    for step in range(6):
        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, generator=generator) * 2.0**step
        oracle["input"].record(x.cpu()), oracle["input"].update()
        oracle["weight"].record(weight.cpu()), oracle["weight"].update()
        weight.mul_(1.0625)
    replayed = steps(first, te(first, mode="reduce-overhead"))
    assert counters["inductor"]["cudagraph_skips"] == 0
    for slot in ("input", "weight"):
        check_entry(replayed, f"0.{slot}", oracle[slot])
    torch._dynamo.reset()
    assert same(steps(second, te(second)), replayed)


def test_state_loaded_into_a_recorded_graph_is_used():
    counters.clear()
    model = mlp()
    run = te(model, mode="reduce-overhead")
    steps(model, run)
    state = te_inductor.state_dict(model)
    wider = {key: value / 4 if key.endswith("scale") else value * 4 for key, value in state.items()}
    te_inductor.load_state_dict(model, wider)
    x = torch.full((32, 64), 0.25, device="cuda", dtype=torch.bfloat16)
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad()  # gradients lie in the graph's memory
    run(x).sum().backward()
    after = te_inductor.state_dict(model)
    assert after["0.input.amax_history"][-1] == 0.25
    assert after["0.input.amax_history"][-2] == wider["0.input.amax_history"][-1]
    assert after["0.input.scale"] == 448 / wider["0.input.amax_history"][-2:].max()
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_models_of_one_class_under_cuda_graphs():
    """One compiled graph, state of its own for each."""
    models = [nn.Linear(64, 64).cuda().bfloat16() for _ in range(2)]
    runs = [te(model, mode="reduce-overhead") for model in models]
    for step in range(4):
        for place, (model, run) in enumerate(zip(models, runs, strict=True)):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            run(torch.full((32, 64), 2.0 ** (step + 8 * place), device="cuda", dtype=torch.bfloat16)).sum().backward()
    histories = [te_inductor.state_dict(model)["input.amax_history"].tolist() for model in models]
    assert histories == [[0.0, 2.0, 4.0, 8.0], [0.0, 512.0, 1024.0, 2048.0]]


def test_what_a_scale_did_not_suit_is_said_without_a_wait():
    """Steps that read the counts do not wait for the device. The one that warns does, once a process: it reads the counts
    of all graphs."""
    model = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    x, run = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16), te(model)
    for _ in range(3):  # behind which all have history
        run(x).square().mean().backward()
    torch.cuda.synchronize()
    with pytest.warns(
        FallbackWarning, match=r"\(root\)\.input, from its step 4 on: values were cut off in 1 and"
    ) as said:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for each in (1000 * x, *[x] * 52):
                run(each).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in said if "called a synchronizing CUDA operation" in str(one.message)]
    assert len(waits) <= sum(len(watch.counts) for known in misfits._watches.values() for watch in known.values())


def test_the_state_moves_with_the_model():
    model = nn.Linear(64, 64)
    run = te(model)
    run(torch.full((32, 64), 3.0)).sum().backward()
    model.zero_grad()
    run = te(model.cuda())
    run(torch.full((32, 64), 5.0, device="cuda")).sum().backward()
    state = te_inductor.state_dict(model)
    assert state["input.amax_history"].tolist() == [0.0, 0.0, 3.0, 5.0]
    assert {value.device.type for value in state.values()} == {"cuda"}
    other = nn.Linear(64, 64).cuda()
    te_inductor.load_state_dict(other, {key: value.cpu() for key, value in state.items()})
    with torch.no_grad():
        te(other)(torch.ones(32, 64, device="cuda"))
    assert same(te_inductor.state_dict(other), state)
