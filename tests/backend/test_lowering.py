"""`lower` on exported programs: they run, are saved and loaded, decomposed, and exported again."""

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import te_inductor
from te_inductor import autocast, explain, lower, quantize_, recipes
from te_inductor.errors import FallbackError, FallbackWarning, OptionError
from te_inductor.passes import pre_grad
from tests.forked import PLAIN
from tests.recipes import STATELESS, strict
from tests.support.layers import linears
from tests.support.traced_graphs import ours


class Model(nn.Module):
    """`F.linear` of three dimensions, a product with a view of a parameter, addmm, and one layer for a policy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.conv, self.shift = nn.Parameter(torch.randn(128, 128) / 12), nn.Parameter(torch.randn(128))
        self.head = nn.Linear(128, 128)

    def forward(self, input):  # a name that Python has too
        h = nn.functional.relu(self.up(input)) @ self.down.weight.t()
        return self.head(torch.addmm(self.shift, h.flatten(0, 1), self.conv).view_as(h))


POLICY = {"head": "none"}


def reference(model, x, recipe):
    slots = recipes.resolve(recipe).slots()

    def linear(x, weight, bias=None):
        return linears(x, [weight], [] if bias is None else [bias], slots, x.dtype)[0]

    h = linear(nn.functional.relu(linear(x, model.up.weight, model.up.bias)), model.down.weight)
    return model.head(linear(h, model.conv.t(), model.shift))


def exported(model, *inputs, dynamic=True):
    return torch.export.export(model, inputs, dynamic_shapes=({0: Dim("batch")},) if dynamic else None)


@pytest.mark.quick("rowwise-decomposed")
@pytest.mark.parametrize("decomposed", [False, True], ids=["exported", "decomposed"])
@pytest.mark.parametrize(
    "name",
    [name if name == "rowwise" else pytest.param(name, marks=pytest.mark.thorough) for name in STATELESS],
)
@pytest.mark.sample(1)
def test_a_program(decomposed, name, tmp_path):
    """All of it on one program: what is written out has hundreds of nodes."""
    model, x = Model().eval(), torch.randn(4, 8, 128)
    program = exported(model, x)
    program = program.run_decompositions() if decomposed else program
    before = str(program.graph)
    lowered = lower(program, {"recipe": name, "policy": POLICY, "fallback": strict(name)})
    assert str(program.graph) == before and not ours(program)
    assert ours(lowered) == {"te_inductor.exported_linears.default"}
    assert lowered.graph_signature.user_outputs == program.graph_signature.user_outputs
    assert lowered.state_dict.keys() == program.state_dict.keys() == model.state_dict().keys()

    other = torch.randn(3, 8, 128)  # another batch
    torch.export.save(lowered, tmp_path / "lowered.pt2")
    written_out = lowered.run_decompositions()
    assert not ours(written_out)
    torch.export.save(written_out, tmp_path / "written_out.pt2")
    programs = [lowered, written_out, *(torch.export.load(path) for path in sorted(tmp_path.iterdir()))]
    again = torch.export.export(lowered.module(), (x,))
    with torch.no_grad():
        for given in (x, other):
            expected = reference(model, given, name)
            for one in programs:
                assert torch.equal(one.module()(given), expected)
        assert torch.equal(again.module()(x), reference(model, x, name))


@pytest.mark.quick("nvfp4_weight_only", "block")
@pytest.mark.parametrize("name", ["nvfp4_weight_only", "current", "rowwise", "block"])
def test_stored_weights_behind_decompositions(name, tmp_path):
    """Such weights stand beside layers that are lowered; saved and loaded, without ops of ours."""
    model, x = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).eval(), torch.randn(4, 128)
    quantize_(model, name, policy={"2": "none"}, fallback="silent")
    program = lower(exported(model, x), {"recipe": "current", "fallback": "error"})
    assert "te_inductor.exported_linears.default" in ours(program) and len(ours(program)) == 2
    written_out = program.run_decompositions()
    assert not ours(written_out)
    torch.export.save(written_out, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for given in (x, torch.randn(7, 128)):
        assert torch.equal(loaded.module()(given), program.module()(given))


def test_an_assertion_of_a_decomposed_program():
    """A node without a value, which nothing reads."""

    class Masked(nn.Linear):
        def forward(self, x):
            places = torch.arange(x.shape[0])
            return super().forward(x) * (places[:, None] == places[None]).to(torch.bool).sum(1, keepdim=True)

    program = exported(Masked(64, 64), x := torch.randn(4, 64)).run_decompositions()
    assert any("val" not in node.meta for node in program.graph.nodes if node.op == "call_function")
    lowered = lower(program, {"recipe": "current", "fallback": "error"})
    assert ours(lowered) and lowered.module()(x).shape == x.shape


@pytest.mark.parametrize("traced", [False, True])
def test_a_pass_that_fails(traced, monkeypatch):
    """The program as it was, with a warning."""
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    step = lambda weight, x: nn.functional.linear(x, weight)  # noqa: E731
    program = make_fx(step, tracing_mode="fake")(model.weight, x) if traced else exported(model, x)

    def fails(plan):
        raise RuntimeError("of a test")

    passes = "TRACED" if traced else "EXPORTED"
    monkeypatch.setattr(pre_grad, passes, (*getattr(pre_grad, passes)[:-1], fails))
    with pytest.warns(FallbackWarning, match=r"a pass of ours failed(.|\n)*of a test"):
        assert lower(program, {"recipe": "current"}, parameters=["w"] if traced else None) is program


def test_gradients_flow_through_a_program():
    model, x = Model(), torch.randn(2, 8, 128, requires_grad=True)
    lowered = lower(exported(model, x.detach(), dynamic=False), {"recipe": "rowwise", "policy": POLICY})
    (found,) = torch.autograd.grad(lowered.module()(x).sum(), x)
    (expected,) = torch.autograd.grad(reference(model, x, "rowwise").sum(), x)
    assert torch.equal(found, expected)


def test_what_runs_is_said_as_for_a_compile():
    model, x = Model().eval(), torch.randn(4, 8, 128)
    program = exported(model, x)
    with pytest.warns(FallbackWarning) as caught:
        lower(program, {"recipe": "delayed", "policy": {"head": "mxfp8", "nothing": "none"}})
    text = str(caught[0].message)
    assert "delayed scaling keeps scales from step to step" in text and "recipe 'current'" in text
    assert "1 of 4 linear sites are emulated" in text and "'nothing' matches no linear site" in text
    with pytest.raises(FallbackError, match="are emulated"):
        lower(program, {"recipe": "mxfp8", "fallback": "error"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert not ours(lower(program, {"recipe": "none"}))
        with autocast(recipe="rowwise"):
            assert ours(lower(program))
    report = explain(program, options={"recipe": "current", "policy": POLICY})
    assert [(site.fqn, site.kernel) for site in report.sites] == [
        ("up", "inductor"),
        ("down", "inductor"),
        ("", "inductor"),
        ("head", "high_precision"),
    ]
    assert not ours(program)


def test_wrong_arguments():
    program = exported(nn.Linear(32, 32), torch.randn(4, 32))
    for options, message in (
        ({"weights": "once"}, "option 'weights' has no effect on a program that is lowered.*quantize_"),
        ({"max_autotune": True}, "option 'max_autotune' has no effect.*inductor_configs"),
        ({"mode": "max-autotune"}, "option 'mode' has no effect"),
        ({"recip": "current"}, "unknown option 'recip'; did you mean 'recipe'"),
    ):
        with pytest.raises(OptionError, match=message):
            lower(program, options)
    with pytest.raises(OptionError, match="parameters= beside an exported program"):
        lower(program, parameters=["weight"])
    with pytest.raises(OptionError, match="inputs beside an exported program"):
        explain(program, torch.randn(4, 32))
    assert te_inductor.lower is lower


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.lin(x), lambda x: x.clone(), (x,))


def test_bodies_stay_in_high_precision():
    program = exported(Branch(), torch.randn(4, 64), dynamic=False)
    with pytest.warns(FallbackWarning, match="inside a body of control flow"):
        lowered = lower(program, {"recipe": "current"})
    x = torch.rand(4, 64)
    assert torch.equal(lowered.module()(x), program.module()(x))


class Regions(nn.Module):
    """A model of whose regions torch.export makes graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[0](x)
        with torch.no_grad():
            x = self.layers[1](x.float())
        return self.layers[2](x)


def test_regions_are_named_and_written_out():
    """Layers keep their names, by which a policy finds them, when decompositions write the region out."""
    program = exported(Regions(), torch.randn(4, 64), dynamic=False)
    reasons = {site.fqn: site.reason for site in explain(program, options={"recipe": "current"}).sites}
    of = {path: (reason or "").partition(",")[0] for path, reason in reasons.items()}
    assert of == {"layers.0": "inside torch.autocast", "layers.1": "inside torch.no_grad", "layers.2": ""}
    assert "program.run_decompositions() before lowering" in str(reasons["layers.0"])
    options = {"recipe": "current", "policy": {"layers.1": "rowwise"}, "fallback": "error"}
    written = program.run_decompositions()
    found = {site.fqn: (site.recipe, site.reason) for site in explain(written, options=options).sites}
    assert found == {"layers.0": ("current", None), "layers.1": ("rowwise", None), "layers.2": ("current", None)}
    lowered, x = lower(written, options), torch.randn(4, 64)
    assert 0 < (lowered.module()(x) - program.module()(x)).norm() < 0.1 * program.module()(x).norm()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("decomposed", [False, True], ids=["exported", "decomposed"])
def test_a_weight_that_the_module_around_multiplies_by(decomposed):
    """Named as torch.compile names it."""
    model, x, options = Attention(), torch.randn(2, 16, 64), {"policy": {"*.out_proj": "rowwise"}}
    program = exported(model, x, dynamic=False)
    of_program = explain(program.run_decompositions() if decomposed else program, options=options)
    names = {site.fqn: site.recipe for site in of_program.sites}
    assert names == {site.fqn: site.recipe for site in explain(model, x, options=options).sites}
    assert names == {"inner": "current", "inner.out_proj": "rowwise"}


FRESH = """
import sys, torch, te_inductor
program, (x, y) = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
assert torch.equal(program.module()(x), y)
assert "torch._inductor.lowering" not in sys.modules
"""


def test_another_process_loads_it(tmp_path):
    model, x = nn.Linear(64, 64).eval(), torch.randn(4, 64)
    lowered = lower(exported(model, x, dynamic=False), {"recipe": "current", "fallback": "error"})
    torch.export.save(lowered, tmp_path / "program.pt2")
    with torch.no_grad():
        torch.save((x, lowered.module()(x)), tmp_path / "tensors")
    done = PLAIN.run("-c", FRESH, str(tmp_path / "program.pt2"), str(tmp_path / "tensors"))
    assert done.returncode == 0, done.stderr[-3000:]
