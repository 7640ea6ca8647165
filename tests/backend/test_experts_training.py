"""What training code does with experts: checkpoints, memory budgets, weight gradients elsewhere, state, export,
caches. Against the eager reference (tests/experts.py), bit for bit."""

import copy
import json
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import te_inductor
from te_inductor import backward_dw, explain, ops
from te_inductor.errors import FallbackWarning
from te_inductor.ops import flops  # noqa: F401 (registers formulas)
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.eager import grouped
from tests.experts import MoE, reference
from tests.forked import PROGRAMS
from tests.support.autograd import same
from tests.support.expert_layers import PATHS, ROUTER, te, tokens
from tests.support.layers import grouped_linears
from tests.support.main_grads import with_totals
from tests.support.oracle_layers import Calls

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")
pytest.importorskip("transformers")
aten = torch.ops.aten
thorough = pytest.mark.thorough
GEMMS = {"grouped_mm": 6, "grouped_wgrad": 5}  # where each has its Gemm


class Wrapped(nn.Module):
    def __init__(self, wrap=lambda block, x: block(x), blocks=1, **more) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoE(**more) for _ in range(blocks))
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = x + self.wrap(block, x)
        return x


def counted(run, model, x) -> tuple[list[torch.Tensor], Counter]:
    """Results, and how often each GEMM of experts ran in the backward."""
    y = run(x)
    with Calls(of=lambda op, args: args[GEMMS[op]].name if op in GEMMS else None) as seen:
        gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y.detach(), *gradients], Counter(seen.names)


def saves(*names):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in names else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


CHECKPOINTS = {  # and how often the backward computes fprop again
    "full": ({}, 2),
    "by torch's name": (saves(aten._grouped_mm.default), 0),
    "by ours": (saves(ops.grouped_mm), 0),
    "by another's": (saves(aten.mm.default, aten.addmm.default), 2),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize(
    "name", ["current", pytest.param("rowwise", marks=thorough), pytest.param("delayed", marks=thorough)]
)
def test_checkpoints(name, how):
    """The same results, and products of experts are kept where the policy names them as they stood."""
    options, again = CHECKPOINTS[how]
    model, x = Wrapped(partial(checkpoint, use_reentrant=False, **options)), tokens()
    plain = copy.deepcopy(model)
    plain.wrap = Wrapped().wrap
    with torch._functorch.config.patch(recompute_views=False):
        found, seen = counted(te(model, name), model, x)
    expected = counted(twin := reference(plain, name), twin, x)[0]
    assert same(found, expected)
    assert seen["dgrad"] == seen["wgrad"] == 2
    assert seen["fprop"] == again


@pytest.mark.traced
@pytest.mark.parametrize("name", ["rowwise", pytest.param("delayed", marks=thorough)])
def test_memory_budgets(name):
    """The same results at every budget; with the least, products are computed again."""
    model, x = Wrapped(blocks=2), tokens()
    twin = reference(model, name)
    expected, again = counted(twin, twin, x)[0], []
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        with functorch.patch(activation_memory_budget=budget):
            found, seen = counted(te(model, name), model, x)
        assert same(found, expected)
        again.append(seen["fprop"])
    assert again[0] == 0 < again[1]


def test_flops():
    """2 M N K each, whatever the groups are; without the room for padding."""
    (experts, n, k), rows = (4, 48, 32), 256
    ends = torch.tensor([0, 100, 130, 256]).int()
    x, dy = torch.randn(rows, k).bfloat16(), torch.randn(rows, n).bfloat16()
    w = torch.randn(experts, n, k).bfloat16()
    x.requires_grad_(), w.requires_grad_()
    slots = te_inductor.recipes.resolve("current").slots()
    with FlopCounterMode(display=False) as ours:
        [y] = grouped_linears(x, [w], [], ends, slots, torch.bfloat16)
        y.backward(dy)
    assert ours.get_total_flops() == 3 * 2 * rows * n * k
    starts, _, source = grouped.layout(ends, rows)
    with FlopCounterMode(display=False) as elsewhere:
        a, b = (torch.zeros(size, len(source)).to(torch.float8_e4m3fn) for size in (n, k))
        one, total = torch.ones(()), torch.zeros(experts, n, k)
        ops.accumulate_grouped_wgrad([total], a, one, b, one, starts, None, slots.wgrad)
        ops.defer_wgrad([], a, one, b, one, starts, None, slots.wgrad)
    assert elsewhere.get_total_flops() == 2 * 2 * rows * n * k


@pytest.mark.parametrize(
    ("where", "name", "split"),
    [("main_grad", "current", True), ("deferred", "current", False)]
    + [
        pytest.param(where, name, split, marks=thorough)
        for where in ("main_grad", "deferred")
        for name in ("rowwise", "mxfp8")
        for split in (False, True)
    ],
)
def test_weight_gradients_elsewhere(where, name, split):
    """The same, bit for bit, after one microbatch and after two."""
    model = MoE(split=split)
    twin, x = copy.deepcopy(model), tokens()
    if where == "main_grad":
        for p in model.experts.parameters():
            p.main_grad = torch.zeros_like(p)
    run, plain = te(model, name, wgrad=where), te(twin, name)
    for step in range(2):
        run(x).square().sum().backward()
        plain(x).square().sum().backward()
        if where == "deferred":
            assert all(step or not p.grad.any() for p in model.experts.parameters())
            assert backward_dw(model) == (3 if split and name != "current" else 2)
        for (path, p), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            of_experts = "experts" in path and where == "main_grad"
            assert torch.equal(p.main_grad if of_experts else p.grad, other.grad), path
            assert not of_experts or p.grad is None


def unmet(model, **options) -> dict[str, str]:
    return {one.fqn: one.reason for one in explain(model, tokens(), options={"policy": ROUTER, **options}).unmet}


def test_options_that_do_not_reach_experts():
    for name in ("current", "delayed", "rowwise"):
        assert unmet(MoE(), weights="once", recipe=name) == {}
    for where in ("main_grad", "deferred"):
        reasons = unmet(with_totals(MoE(form="direct")), wgrad=where)
        assert set(PATHS) <= set(reasons) and "holds the transpose" in reasons[PATHS[0]]
    assert unmet(MoE(), wgrad="main_grad")[PATHS[0]] == "the parameter has no main_grad"


SHORT = DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("split", [pytest.param(False, marks=thorough), True])
def test_state(split):
    """Keys by parameter; a copy that loads the state goes on bit for bit."""
    model = MoE(split=split)
    run = te(model, SHORT)
    xs = [scale * tokens().detach() for scale in (1.0, 3.0, 0.5, 2.0)]
    for x in xs[:2]:
        run(x).square().sum().backward()
    model.zero_grad()
    state = te_inductor.state_dict(run)
    keys = sorted({key.rpartition(".")[0] for key in state})
    of = ["w1", "w3"] if split else ["gate_up_proj"]
    assert keys and all(any(name in key for key in keys) for name in [*of[:1], "down_proj"]), keys
    twin = copy.deepcopy(model)
    other = te(twin, SHORT)
    te_inductor.load_state_dict(other, copy.deepcopy(state))
    for x in xs[2:]:
        for one in (run, other):
            one(x).square().sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    first, second = te_inductor.state_dict(run), te_inductor.state_dict(other)
    assert list(first) == list(second) and same(first.values(), second.values())
    assert any(not torch.equal(first[key], state[key]) for key in first)


def test_delayed_scaling_does_not_see_rows_behind():
    """Whatever stands there, the state and the gradients are the same."""
    found = []
    for poison in (0.0, 1e4, torch.nan):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = MoE(), tokens()
        model.dropped = 17
        model.experts.register_forward_pre_hook(partial(_poisoned, poison))
        run = te(model, SHORT)
        for _ in range(3):
            run(x).square().sum().backward()
        found.append([*te_inductor.state_dict(run).values(), x.grad, *(p.grad for p in model.parameters())])
    assert same(found[0], found[1]) and same(found[0], found[2])


def _poisoned(poison, experts, inputs):
    x, ends = inputs
    return torch.where(torch.arange(len(x))[:, None] < ends[-1], x, poison), ends


def test_gradients_add_up():
    """Microbatches, one graph."""
    model = MoE()
    twin, run = reference(model, "current"), te(model, "current")
    for _ in range(3):
        x = tokens()
        run(x).square().sum().backward()
        twin(x.detach()).square().sum().backward()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad)


def test_experts_that_no_graph_reached():
    """transformers' op is a product of experts in eager code too."""
    model, x = MoE(), tokens()
    model.experts.forward = torch._dynamo.disable(model.experts.forward)
    found = [(site.fqn, site.reason) for site in explain(model, x).sites if site.pattern == "grouped_linear"]
    assert found == 2 * [("experts", "no compiled graph reached it (graph break or skipped code)")]


def test_export():
    """torch.export says that it leaves the backend out."""
    model, x = MoE(), tokens()
    with pytest.warns(FallbackWarning, match='leaves out backend="te"'):
        program = torch.export.export(torch.compile(model, backend="te", options={"policy": ROUTER}), (x,))
    assert torch.equal(program.module()(x), model(x))


@thorough
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_a_second_process_hits_the_caches(name, tmp_path):
    accounts = []
    for _ in range(2):
        done = PROGRAMS.run("tests.backend.experts_program", name, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-4000:]
        accounts.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = accounts
    assert first["miss"] == second["hit"] > 0 and first["bypass"] == second["miss"] == 0
    assert first["loss"] == second["loss"]
