"""`lower` on graphs of forward, loss and backward with experts: all three grouped products of each layer are found, and
run in low precision with the results of the same layers under autograd, bit for bit: those that
`torch.compile(model, backend="te")` has without code generation."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tests.experts
from te_inductor import lower, ops
from te_inductor.errors import FallbackError, FallbackWarning
from te_inductor.recipes import DelayedScaling
from tests.experts import BARE, EACH, FOLDED, FORMS, HIDDEN, Experts, MoE, reference
from tests.recipes import STATELESS, quick, strict
from tests.support.autograd import same
from tests.support.expert_layers import ROUTER, Biased, te, tokens
from tests.support.traced_graphs import fakes, joint_of

pytestmark = pytest.mark.usefixtures("without_codegen", "one_seed")
pytest.importorskip("transformers")  # whose op multiplies in fp32
thorough = pytest.mark.thorough


def step_of(model, *inputs):
    """A function of parameters and inputs that returns the output and all gradients, with the parameters' names."""
    names = [name for name, _ in model.named_parameters()]

    def step(parameters, *inputs):
        y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), inputs)
        wanted = [one for one in (*inputs, *parameters) if one.requires_grad]
        return y, *torch.autograd.grad(y.float().square().sum(), wanted)

    return step, list(model.parameters()), names


def high(graph) -> list[str]:
    """Grouped products in high precision."""
    return [node.name for node in graph.graph.nodes if "grouped_mm" in node.name and "te_" not in str(node.target)]


def lowered(model, name, *inputs, **options):
    step, parameters, names = step_of(model)
    graph = make_fx(step, tracing_mode=options.pop("tracing_mode", "fake"))(parameters, *inputs)
    made = lower(graph, {"recipe": name, "policy": ROUTER, "fallback": strict(name), **options}, parameters=names)
    assert high(graph)
    return made, lambda: made(parameters, *inputs)


def check(model, name, *inputs, **options) -> torch.fx.GraphModule:
    made, run = lowered(model, name, *inputs, **options)
    assert not high(made)
    step, parameters, _ = step_of(reference(model, name))
    assert same(run(), expected := step(parameters, *inputs))
    assert not torch.equal(expected[0], model(*inputs))
    return made


def cast_rows(graph) -> list[int]:
    """How many rows each cast of an activation has."""
    casts = graph.graph.find_nodes(op="call_function", target=ops.quantize)
    return [node.args[0].meta["val"].shape[0] for node in casts]


def targets(graph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]


@quick("current", of=[name for name in STATELESS if name != "block"])
def test_recipes(name):
    check(MoE(), name, tokens())


def test_blocks():
    """The sizes are such that blocks fill them; there are empty groups, one of them the first."""
    experts = Experts(inner=128, experts=3)
    for weight, shape in (("gate_up_proj", (3, 256, 128)), ("down_proj", (3, 128, 128))):
        setattr(experts, weight, nn.Parameter(torch.randn(shape) / shape[2] ** 0.5))
    ends = torch.tensor([0, 70, 70], dtype=torch.int32)
    check(experts, "block", torch.randn(80, 128, requires_grad=True), ends)


FORMS_RUN = [("transpose", torch.bfloat16, True), ("direct", torch.float32, False), ("cast", torch.float32, True)]


@pytest.mark.parametrize(
    ("form", "dtype", "split"),
    FORMS_RUN
    + [
        pytest.param(*case, marks=thorough)
        for case in itertools.product(FORMS, (torch.float32, torch.bfloat16), (False, True))
        if case not in FORMS_RUN
    ],
)
def test_forms(form, dtype, split):
    """The forms are either order of dimensions, and casts of weights, whose gradients are not rounded on the way; w1
    and w3 apart."""
    experts, ends = Experts(form, split).to(dtype), torch.tensor([7, 7, 31, 48], dtype=torch.int32)
    x = torch.randn(48, HIDDEN, dtype=torch.bfloat16 if form.startswith("cast") else dtype, requires_grad=True)
    made = check(experts, "rowwise", x, ends)
    assert targets(made).count("te_inductor.quantize_experts_rows.default") == (0 if form == "direct" else 2 + split)


def test_a_compiled_step(monkeypatch):
    """The step is compared with the backend's itself, also where rows belong to no group, and where more than two
    gradients are added up: in fp32."""
    monkeypatch.setattr(tests.experts, "EACH", 3)
    model, x = MoE().bfloat16(), tokens(dtype=torch.bfloat16)
    model.dropped = 17
    made, run = lowered(model, "rowwise", x)
    compiled = te(twin := copy.deepcopy(model), "rowwise")
    y = compiled(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *twin.parameters()])
    assert same(run(), [y.detach(), *gradients])
    assert targets(made).count("aten.index_put.default") == 3  # of a permutation, of its inverse, of the scores


@pytest.mark.parametrize(
    "frozen", [["w3", "down_proj"], pytest.param(["w1", "w3", "down_proj"], marks=thorough)], ids=str
)
def test_frozen_experts(frozen):
    """No GEMM is computed for a gradient that nobody wants."""
    experts = Experts(split=True)
    for name in frozen:
        getattr(experts, name).requires_grad_(False)
    ends, x = torch.tensor([7, 7, 31, 40], dtype=torch.int32), torch.randn(48, HIDDEN, requires_grad=True)
    made = check(experts, "rowwise", x, ends)
    assert targets(made).count("te_inductor.grouped_wgrad.default") == 3 - len(frozen)
    assert targets(made).count("te_inductor.grouped_mm.default") == 6


@thorough
@pytest.mark.parametrize("pick", [*FOLDED, *BARE])
def test_gathers(pick):
    """Rows are cast before they are gathered, where nothing changes them before the backward has read them again."""
    made = check(MoE(pick), "rowwise", tokens())
    assert cast_rows(made)[0] == (24 if pick in FOLDED else 48)


def test_what_is_written_before_the_backward():
    """Rows that the backward would gather from another tensor than the forward did are gathered before the cast."""

    class Written(MoE):
        def forward(self, x):
            held = x * 1.0
            y = super().forward(held)
            held.add_(1.0)
            return y

    model = Written()
    model.gate.requires_grad_(False)  # else autograd itself would object
    made = check(model, "rowwise", tokens())
    assert cast_rows(made)[0] == 48


def test_layers_of_one_input():
    """Two that want no gradient of it are told apart by autograd's numbers of the ops alone."""
    experts, x = Experts(split=True), torch.randn(48, HIDDEN)
    ends = torch.tensor([7, 7, 31, 48], dtype=torch.int32)
    experts = experts.bfloat16()
    inputs = x.bfloat16(), ends
    with pytest.raises(FallbackError, match=r"several products of the backward fit this layer.*: w1, w3"):
        lowered(experts, "rowwise", *inputs)
    step, parameters, names = step_of(experts)
    graph = make_fx(step, tracing_mode="fake")(parameters, *inputs)
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    for node, of in zip(products, [1, 3, 2, 2, 2, 3, 1], strict=True):  # the backward has w3 first
        node.meta["seq_nr"] = of
    made = lower(graph, {"recipe": "rowwise", "fallback": "error"}, parameters=names)
    step, twins, _ = step_of(reference(experts, "rowwise"))
    assert not high(made) and same(made(parameters, *inputs), step(twins, *inputs))


def test_a_bias():
    """The bias stays behind the product, and its gradient is the graph's own."""
    model, x = Biased("in place"), tokens()
    made, run = lowered(model, "rowwise", x)
    assert not high(made)
    y = te(twin := copy.deepcopy(model), "rowwise")(x)
    expected = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *twin.parameters()])]
    names = [name for name, _ in model.named_parameters()]
    for name, one, other in zip(["y", "x", *names], run(), expected, strict=True):
        if name == "bias":  # its rows are added up in another order
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other), name


def test_a_joint_graph_of_aot_autograd():
    """The graph is as autoparallel has it."""
    model, x = MoE("torchtitan").bfloat16(), tokens(dtype=torch.bfloat16).detach()
    with contextlib.ExitStack() as stack:
        aot_autograd, joint = joint_of(model, x, stack)
        joint.graph_module = lower(joint.graph_module, {"recipe": "rowwise", "policy": ROUTER, "fallback": "error"})
        assert not high(joint.graph_module)
        assert cast_rows(joint.graph_module)[0] == 24  # before they are gathered
        run = aot_autograd.aot_compile_joint_with_descriptors(joint)
    run(*model.parameters(), x).float().square().sum().backward()
    step, parameters, _ = step_of(reference(model, "rowwise"))
    assert same([one.grad for one in model.parameters()], step(parameters, x)[1:])


@thorough
def test_rows_of_a_number_that_is_a_symbol():
    experts, ends = Experts(), torch.tensor([7, 7, 31, 40], dtype=torch.int32)
    step, parameters, names = step_of(experts)
    x = tokens(60)
    *fake, rows, _ = inputs = fakes([*parameters, x, ends], [x])
    for one in (*fake, rows):
        one.requires_grad_()
    with rows.fake_mode:
        graph = make_fx(step)(fake, *inputs[len(fake) :])
    made = lower(graph, {"recipe": "rowwise", "fallback": "error"}, parameters=names)
    assert not high(made)
    x = tokens(48)
    step, parameters, _ = step_of(reference(experts, "rowwise"))
    assert same(made(parameters, x, ends), step(parameters, x, ends))


def test_what_is_refused():
    model, x = MoE(), tokens()
    with pytest.warns(FallbackWarning, match="delayed scaling keeps scales from step to step.*experts.gate_up_proj"):
        made, _ = lowered(model, DelayedScaling(), x, fallback="warn")
    assert len(high(made)) == 4

    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(40, HIDDEN, 48))

        def forward(self, x):
            return F.silu(x.view(40, -1, HIDDEN)).bmm(self.experts)

    step, parameters, names = step_of(Batched())
    x = tokens(40 * EACH)
    graph = make_fx(step, tracing_mode="fake")(parameters, x)
    with pytest.raises(FallbackError, match="not mm, addmm or a grouped product"):
        lower(graph, {"recipe": "current", "fallback": "error"}, parameters=names)
