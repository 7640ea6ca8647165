"""Programs that write tensors in place, where layers are about to read them or between two that do: each layer reads
what is there when its turn comes, bit for bit the quantized program without a compiler."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils.checkpoint import checkpoint

from te_inductor import explain
from te_inductor.passes.graph import aliases, writes
from tests.eager import quantized, quantized_as

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")


@torch.library.custom_op("te_inductor_tests::halve", mutates_args={"x"})
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("te_inductor_tests::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1) * 2


flat.register_fake(lambda x: x.new_empty(x.numel()))


LIBRARY = torch.library.Library("te_inductor_tests", "FRAGMENT")
LIBRARY.define("negate(Tensor(a!)[] xs, Tensor y) -> ()")
LIBRARY.impl("negate", lambda xs, y: [x.neg_() for x in xs] and None, "CPU")
LIBRARY.impl("negate", lambda xs, y: None, "Meta")


def negate(x):
    """Negates as libraries in C++ register their ops: nothing counts versions."""
    torch.ops.te_inductor_tests.negate([x], torch.ones(1))


class Model(nn.Module):
    """Two layers of one input, whose size is theirs, in a program."""

    def __init__(self, program, size=64):
        super().__init__()
        self.a, self.b, self.program = nn.Linear(size, size), nn.Linear(size, size), program

    def forward(self, x):
        return self.program(self, x)


def in_one_buffer(model):
    """Lays out parameters as Megatron does: the last one first, and here each at an odd address."""
    parameters = list(model.parameters())[::-1]
    buffer, at = torch.empty(sum(p.numel() + 1 for p in parameters)), 0
    for p in parameters:
        p.data = buffer[at : at + p.numel()].view(p.shape).copy_(p.data)
        at += p.numel() + 1


def compare(program, recipe="current", training=True, lay_out=None, **options):
    """Three calls of two copies, one compiled; of delayed scaling one, as the twin knows no scale but the first.
    Returns the report."""
    options = {"recipe": recipe, "fallback": "error", **options}
    model, x = Model(program, 128 if recipe == "block" else 64), torch.randn(16, 128 if recipe == "block" else 64)
    if lay_out is not None:
        lay_out(model)
    copied = copy.deepcopy(model)
    if lay_out is not None:
        lay_out(copied)
    report = explain(copied, x, options=options)
    twin = quantized_as(report, model, {})
    compiled = torch.compile(model, backend="te", fullgraph=True, options=options)
    for _ in range(1 if recipe == "delayed" else 3):
        xs = [torch.randn_like(x).requires_grad_(training)]
        xs.append(xs[0].detach().clone().requires_grad_(training))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):  # so that an edit finds what it changes
            p.data.copy_(q.data.normal_(std=0.1))
        with torch.set_grad_enabled(training):
            found, expected = compiled(xs[0]), twin(xs[1])
        assert torch.equal(found, expected)
        if training:
            found.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(xs[0].grad, xs[1].grad)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), name
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name
    return report


def assign_data(m):
    m.a.weight.data = m.a.weight.data.clamp(-0.05, 0.05)


def add_to_data(m):
    m.a.weight.data += 1


def out_argument(m):
    torch.mul(m.a.weight, -1, out=m.a.weight.data)


def set_item(m):
    m.a.weight[3:9] = 0


def in_a_checkpoint(m):
    def body(x):
        m.a.weight.mul_(-1)
        return x + 1

    checkpoint(body, torch.ones(3), use_reentrant=False)


EDITS = {
    "clamp_": lambda m: m.a.weight.clamp_(-0.05, 0.05),
    "data.clamp_": lambda m: m.a.weight.data.clamp_(-0.05, 0.05),
    "detach().mul_": lambda m: m.a.weight.detach().mul_(-1),
    "copy_": lambda m: m.a.weight.copy_(F.normalize(m.a.weight, dim=1)),
    "assign data": assign_data,
    "add to data": add_to_data,
    "a view": lambda m: m.a.weight.view(-1)[::2].mul_(-1),
    "set item": set_item,
    "out=": out_argument,
    "inplace=True": lambda m: F.relu(m.a.weight.data, inplace=True),
    "a list": lambda m: torch._foreach_mul_(list(m.parameters()), -1.0),
    "average": lambda m: m.a.weight.mul_(0.5).add_(m.b.weight, alpha=0.5),
    "a custom op": lambda m: halve(m.a.weight),
    "a custom op on data": lambda m: halve(m.a.weight.data),
    "a library's op": lambda m: negate(m.a.weight),
    "max_norm": lambda m: F.embedding(torch.tensor([1, 2, 3]), m.a.weight, max_norm=0.1),
    "in a checkpoint": in_a_checkpoint,
}


@pytest.mark.quick(
    "clamp_-",
    "detach().mul_-",
    "assign data-",
    "a view-",
    "out=-",
    "inplace=True-buffer",
    "a list-",
    "a custom op-",
    "max_norm-buffer",
    "in a checkpoint-",
)
@pytest.mark.parametrize("lay_out", [None, in_one_buffer], ids=["", "buffer"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_weight_changed_before_its_use(edit, lay_out):
    """WGAN clips weights so, and DINO normalizes them: the copies that are kept between calls are made before that."""

    def program(m, x):
        with torch.no_grad():
            EDITS[edit](m)
        return m.b(F.gelu(m.a(x)))

    compare(program, lay_out=lay_out)


@pytest.mark.traced
@pytest.mark.parametrize(
    ("recipe", "options"), [("rowwise", {}), ("block", {"weights": "once"}), ("mxfp8", {"weights": "once"})]
)
def test_recipes(recipe, options):
    def program(m, x):
        with torch.no_grad():
            m.a.weight.clamp_(-0.05, 0.05)
        return m.b(F.gelu(m.a(x)))

    report = compare(program, recipe, **{"fallback": "silent", **options})
    if options:
        [unmet] = report.unmet
        assert unmet.fqn == "a" and "changed in the graph" in unmet.reason


@pytest.mark.traced
@pytest.mark.quick("current-once", "rowwise-each_call", "delayed-once", "block-each_call")
@pytest.mark.parametrize("weights", ["each_call", "once"])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "delayed", "block"])
def test_a_weight_changed_behind_its_use(recipe, weights):
    """The backward, which casts most weights again, has those of the forward: of gradients torch makes an error
    here."""

    def program(m, x):
        y = m.b(F.gelu(m.a(x)))
        with torch.no_grad():
            m.a.weight.mul_(-1)
            m.b.weight.zero_()
        return y

    compare(program, recipe, weights=weights, fallback="silent")


@pytest.mark.traced
@torch._dynamo.config.patch(trace_autograd_ops=True)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_a_training_step_in_one_graph(recipe):
    """Forward, gradients and the optimizer, which writes what the forward has read."""

    def step_of(model):
        def step(x):
            loss = model(x).square().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), gradients, alpha=-0.01)
            return loss.detach()

        return step

    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(16, 64)
    options = {"recipe": recipe, "fallback": "error"}
    eager = step_of(quantized(model, x, options=options))
    compiled = torch.compile(step_of(model), backend="te", fullgraph=True, options=options)
    for _ in range(3):
        x = torch.randn_like(x)
        assert torch.equal(compiled(x), eager(x))


def test_inference_with_kept_copies():
    def program(m, x):
        with torch.no_grad():
            m.a.weight.mul_(-1)
        return m.b(m.a(x))

    compare(program, training=False, weights="once", fallback="silent")


def test_a_weight_that_is_only_read_is_kept():
    """What a regularizer or a view does to it changes nothing."""

    def program(m, x):
        penalty = m.a.weight.square().sum() + m.a.weight.view(-1).abs().mean() + m.a.weight.detach().amax()
        return m.b(F.gelu(m.a(x))) + penalty

    assert compare(program, weights="once").unmet == []


def test_beside_a_transform():
    """The transform's tensors are wrapped, and what is written of them counts."""

    def program(m, x):
        with torch.no_grad():
            scale = torch.vmap(lambda row: row.clone().mul_(2).sum())(x)
            torch.vmap(lambda row: row.mul_(-1).sum())(m.a.weight)
        return m.b(F.gelu(m.a(x))) * scale.unsqueeze(-1)

    compare(program)


def test_a_triton_kernel_may_write_what_it_is_given():
    """The graph that Dynamo makes of a call, which it does where there is a GPU."""
    graph, nodes = fx.Graph(), {}
    for letter in "xwv":
        nodes[letter] = graph.placeholder(letter)
        nodes[letter].meta["example_value"] = torch.empty(32, 32)
    nodes["y"] = graph.call_function(F.linear, (nodes["x"], nodes["w"]))
    nodes["y"].meta["example_value"] = torch.empty(32, 32)
    call = graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"ptr": nodes["w"]}})
    graph.output(graph.call_function(F.linear, (nodes["y"], nodes["v"])))
    found = writes.DynamoWrites(fx.GraphModule({}, graph).graph)
    assert {letter for letter, node in nodes.items() if found.anywhere(node)} == {"w"}
    assert aliases.is_opaque(call)


def between(write):
    """A write between two layers that read what it writes."""

    def program(m, x):
        x = x * 2
        y = m.a(x)
        with torch.no_grad():
            write(m, x)
        return y.sigmoid() + m.b(x).sigmoid()

    return program


def set_rows(m, x):
    x[3:] = 0


BETWEEN = {
    "input": lambda m, x: x.mul_(-1),
    "a view of the input": lambda m, x: x.view(-1)[::2].zero_(),
    "rows of the input": set_rows,
    "input, by a custom op": lambda m, x: halve(x),
    "input, by a library's op": lambda m, x: torch.ops.te_inductor_tests.negate.default([x], torch.ones(1)),
    "input, in a list": lambda m, x: torch._foreach_mul_([x], -1.0),
    "weight": lambda m, x: m.b.weight.mul_(-1),
    "weights, in a list": lambda m, x: torch._foreach_mul_(list(m.b.parameters()), -1.0),
    "bias": lambda m, x: m.b.bias.fill_(100.0),
}


@pytest.mark.quick(
    "input-",
    "a view of the input-buffer",
    "input, by a custom op-buffer",
    "weight-",
    "weights, in a list-buffer",
    "bias-",
)
@pytest.mark.parametrize("lay_out", [None, in_one_buffer], ids=["", "buffer"])
@pytest.mark.parametrize("write", BETWEEN)
def test_a_write_between_layers_of_one_input(write, lay_out):
    """Such layers are not one GEMM. Autograd forbids writing what the backward wants, so those run without."""
    report = compare(between(BETWEEN[write]), training="input" not in write, weights="each_call", lay_out=lay_out)
    assert {site.merged for site in report.sites} == {()}


@pytest.mark.parametrize("weights", ["each_call", "once"])
@pytest.mark.parametrize("body", [False, True])
def test_parameters_in_one_buffer(weights, body):
    """Nobody writes them: layers are one GEMM, and copies are kept."""

    def program(m, x):
        if body:
            return checkpoint(lambda x: m.a(x).sigmoid() + m.b(x).sigmoid(), x, use_reentrant=False)
        return m.a(x).sigmoid() + m.b(x).sigmoid() + m.a.weight.t().mean()

    report = compare(program, weights=weights, lay_out=in_one_buffer)
    assert {site.merged for site in report.sites} == {("a", "b")} and report.unmet == []


def test_inference_mode():
    program = between(BETWEEN["input"])
    with torch.inference_mode():
        compare(program, training=False, weights="each_call")


def strided(m, x):
    y, z = m.a(x), m.b(x)
    return y.as_strided((8, 64), (128, 1)) * z[:8] + z.as_strided((8, 64), (128, 1), 64)


def as_strided(m, x):
    return torch.as_strided(m.a(x), (8, 64), (128, 1)) * m.b(x)[:8]


def relu_in_place(m, x):
    return F.relu(m.a(x), inplace=True) + F.dropout(m.b(x), 0.0, inplace=True)


def in_checkpoint(m, x):
    return checkpoint(lambda y, z: y.view(-1) * z.view(-1), m.a(x), m.b(x), use_reentrant=False)


def other_dtype(m, x):
    return m.a(x).view(torch.complex64).real.repeat(1, 2) + m.b(x)


@pytest.mark.traced
@pytest.mark.parametrize("program", [strided, as_strided, relu_in_place, in_checkpoint, other_dtype])
def test_what_notices_a_slice(program):
    """Outputs of one GEMM are slices of its matrix, with other strides than those of a layer alone."""
    report = compare(program)
    assert {site.merged for site in report.sites} == {()}


def test_foreign_code_that_reads_outputs():
    report = compare(lambda m, x: flat(m.a(x)) + flat(m.b(x)), training=False)
    assert {site.merged for site in report.sites} == {()}
