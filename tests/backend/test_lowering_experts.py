"""`lower` on exported programs with experts: the same as `torch.compile(model, backend="te")` without code generation,
bit for bit; saved and loaded, and decomposed."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from te_inductor import explain, lower
from tests.experts import MoE
from tests.recipes import STATELESS, strict
from tests.support.expert_layers import PATHS, ROUTER, Biased, te, tokens
from tests.support.traced_graphs import ours

pytestmark = pytest.mark.usefixtures("without_codegen", "one_seed")
pytest.importorskip("transformers")
thorough = pytest.mark.thorough
OPS = {f"te_inductor.{name}.default" for name in ("exported_grouped_linears", "mask_rows", "places_of")}


def exported(model, *inputs):
    return torch.export.export(model, inputs)


@pytest.mark.quick("rowwise-exported")
@pytest.mark.parametrize("decomposed", [False, True], ids=["exported", "decomposed"])
@pytest.mark.parametrize(
    "name",
    [name if name == "rowwise" else pytest.param(name, marks=thorough) for name in STATELESS if name != "block"],
)
@pytest.mark.sample(1)
def test_a_program(name, decomposed, tmp_path):
    model, x = MoE().eval(), tokens().detach()
    program = exported(model, x)
    program = program.run_decompositions() if decomposed else program
    options = {"recipe": name, "policy": ROUTER, "fallback": strict(name)}
    lowered = lower(program, options)
    assert ours(lowered) == OPS
    assert [site.fqn for site in explain(program, options=options).sites] == ["gate", *PATHS]
    written_out = lowered.run_decompositions()
    assert not ours(written_out)
    torch.export.save(lowered, tmp_path / "lowered.pt2")
    torch.export.save(written_out, tmp_path / "written_out.pt2")
    with torch.no_grad():
        expected = te(model, name)(x)
        for one in (lowered, torch.export.load(tmp_path / "lowered.pt2")):
            assert torch.equal(one.module()(x), expected)
        # The order of sums in fp32 is another.
        found = torch.export.load(tmp_path / "written_out.pt2").module()(x)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


class Disturbed(MoE):
    """Writes x, the order of its rows, or neither, between what reads them and the product."""

    def __init__(self, writes: str) -> None:
        super().__init__("cast")
        self.writes = writes
        self.experts.register_forward_pre_hook(self._write)

    def forward(self, x):
        self.held = x * 1.0
        return super().forward(self.held)

    def _write(self, experts, inputs):
        if self.writes == "x":
            self.held.view(-1).add_(1.0)  # by another name
        elif self.writes == "another":
            torch.zeros(4).add_(1.0)


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize("writes", ["nothing", "x", pytest.param("another", marks=thorough)])
def test_what_is_written_in_between(writes):
    """Rows are cast behind the gather where x is written, by whatever name; ATen's schemas say which names are its."""
    model, x = Disturbed(writes).eval(), tokens().detach()
    lowered = lower(exported(model, x), {"recipe": "current", "policy": ROUTER, "fallback": "error"})
    assert ("te_inductor.places_of.default" in ours(lowered)) == (writes != "x")
    with torch.no_grad():
        assert torch.equal(lowered.module()(x), te(model, "current")(x))


def test_biases():
    """Part of the layer, as in a compile."""
    model, x = Biased("in place").eval(), tokens().detach()
    lowered = lower(exported(model, x), {"recipe": "rowwise", "policy": ROUTER, "fallback": "error"})
    [layer] = [node for node in lowered.graph.nodes if "grouped_linears" in str(node.target)]
    assert len(layer.args[2]) == 1 and "aten.add_.Tensor" not in {str(node.target) for node in lowered.graph.nodes}
    with torch.no_grad():
        assert torch.equal(lowered.module()(x), te(model, "rowwise")(x))


@thorough
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"])
@pytest.mark.sample(1)
def test_transformers(name, recipe, dynamic):
    from tests.support.expert_models import build, inputs

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(name).eval()

        def forward(self, x):
            return self.model(inputs_embeds=x, use_cache=False).logits

    model, x = Logits(), inputs()
    options = {"recipe": recipe, "policy": {"*.experts.*": recipe, "*": "none"}, "fallback": "silent"}
    shapes = ({1: Dim("rows", max=64)},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    lowered = lower(program, options)
    layers = [node for node in lowered.graph.nodes if "exported_grouped_linears" in str(node.target)]
    assert len(layers) == 2 and sum("rows" in node.kwargs for node in layers) == 1
    assert len(layers[0].args[2]) == (1 if name == "gpt_oss" else 0)
    run = torch.compile(model, backend="te", options=options)
    with torch.no_grad():
        high, expected = model(x), run(x)
        for one in (lowered, lower(program.run_decompositions(), options)):
            found = one.module()(x)
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert (high - expected).norm() > 1e-3 * high.norm()
