"""`quantize_`: stored weights in programs, state_dicts, compiled graphs, and what is refused."""

import copy
import io
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.api.quantization import quantize_
from te_inductor.errors import FallbackError, FallbackWarning, OptionError, RecipeError, StoredWeightError
from te_inductor.ops.stored_weight import Float8Weight, NVFP4Weight, StoredWeight
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    NVFP4BlockScaling,
    NVFP4WeightOnly,
    Slots,
)
from tests.forked import PLAIN
from tests.oracle import casts

RECIPES = ["nvfp4_weight_only", "rowwise", "current", "block"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
pytestmark = pytest.mark.usefixtures("without_tracing")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 48, bias=False))


def compiled(module, **options):
    return torch.compile(module, backend=te_inductor.te, fullgraph=True, options=options or None)


@recipes
def test_state_dict(recipe):
    """Saved and loaded, in each way that torch has, by its own keys."""
    plain = model()
    quantized, x = quantize_(copy.deepcopy(plain), recipe), torch.randn(5, 96)
    expected = quantized(x)
    assert quantized.state_dict().keys() == plain.state_dict().keys()
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    for weights_only in (False, True):
        file.seek(0)
        saved = torch.load(file, weights_only=weights_only)
        fresh = quantize_(model(), recipe)
        fresh.load_state_dict(saved)
        assert torch.equal(fresh(x), expected)
        assigned = model().requires_grad_(False)
        assigned.load_state_dict(saved, assign=True)
        assert torch.equal(assigned(x), expected)
    from_plain = quantize_(model(), recipe)
    from_plain.load_state_dict(plain.state_dict())
    assert torch.equal(from_plain(x), expected)
    into_plain = model()
    into_plain.load_state_dict(quantized.state_dict())
    assert torch.equal(into_plain[0].weight, quantized[0].weight.dequantize())
    with torch.device("meta"):
        late = model()
    quantize_(late, recipe).to_empty(device="cpu").load_state_dict(quantized.state_dict())
    assert torch.equal(late(x), expected)


def test_a_process_that_only_imports_the_package_loads(tmp_path):
    """All recipes in one file, by the loader that runs no code of a file's choice."""
    layers, names = {}, ("nvfp4_weight_only", "current", "rowwise", "block")
    for name in names:
        layers |= {f"{name}.{key}": value for key, value in quantize_(model(), name).state_dict().items()}
    torch.save(layers, tmp_path / "model.pt")
    code = (
        "import sys, torch, te_inductor; print('torch._inductor' in sys.modules);"
        "print({type(one).__name__ for one in torch.load(sys.argv[1], weights_only=True).values()})"
    )
    done = PLAIN.run("-c", code, str(tmp_path / "model.pt"))
    assert done.returncode == 0, done.stderr[-2000:]
    early, kinds = done.stdout.splitlines()
    assert early == "False" and {"NVFP4Weight", "Float8Weight"} <= eval(kinds)


def test_pickled_weights_are_in_nvfp4s_own_order():
    """What other readers of the format expect: the first of two values in the low nibble."""
    weight = quantize_(nn.Linear(16, 1, bias=False)).weight
    _, saved, shape, dtype, recipe, is_parameter = weight.__reduce_ex__(2)[1]
    parts = [data.view(of).view(size) for data, of, size in saved]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibbles = torch.stack([parts[0] & 15, parts[0] >> 4], -1).flatten().long()
    read = values[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * parts[1].float() * parts[2]
    assert torch.equal(read, weight.dequantize())
    assert shape == (1, 16) and dtype == torch.float32 and recipe == NVFP4WeightOnly() and is_parameter


def test_bytes():
    """4.5 bits a weight and 4 bytes a tensor; 8 bits and 4 bytes a row."""
    n, k = 192, 320
    for recipe, expected in (("nvfp4_weight_only", n * k * 9 // 16 + 4), ("rowwise", n * k + 4 * n)):
        weight = quantize_(nn.Linear(k, n), recipe).weight
        assert weight.stored_bytes == expected
        assert weight.shape == (n, k) and isinstance(weight, nn.Parameter) and not weight.requires_grad


@recipes
def test_copies_and_casts(recipe):
    quantized, x = quantize_(model(), recipe), torch.randn(3, 96)
    expected = quantized(x)
    assert torch.equal(copy.deepcopy(quantized)(x), expected)
    quantized.to(torch.bfloat16)
    assert quantized[0].weight.dtype == torch.bfloat16
    y = quantized(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.1 * expected.abs().max().item())


@recipes
def test_compiled(recipe):
    """One graph, as the eager model: bit for bit without code generation, as the ops are the same."""
    quantized, x = quantize_(model(), recipe), torch.randn(5, 96)
    with torch.no_grad():
        assert torch.equal(compiled(quantized, fallback="error")(x), quantized(x))


@pytest.mark.codegen
def test_compiled_to_code():
    quantized, x = quantize_(model(), policy={"2": "rowwise"}), torch.randn(2, 3, 96)
    assert isinstance(quantized[0].weight, NVFP4Weight) and isinstance(quantized[2].weight, Float8Weight)
    with torch.no_grad():
        torch.testing.assert_close(compiled(quantized, fallback="error")(x), quantized(x), rtol=1e-5, atol=1e-6)


def test_torch_autocast():
    quantized, x = quantize_(model()), torch.randn(5, 96)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = quantized(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(compiled(quantized)(x), y)


def test_attributes_behind_a_graph_break():
    """Code that Dynamo writes reads them anew, outside of any graph. The frame that they call would call itself."""
    weight, x = quantize_(nn.Linear(96, 160, bias=False), "rowwise").weight, torch.randn(5, 96)

    def broken(weight, x):
        turned, same = weight.T, weight.data
        torch._dynamo.graph_break()
        return x @ turned, x @ same.mT, weight.mT, weight.grad

    *found, gradient = torch.compile(broken, backend="te", options={"recipe": "none"})(weight, x)
    assert gradient is None and all(map(torch.equal, found, broken(weight, x)))


def expected_gradient(dy, weight):
    """dy @ what is stored. Where it is an FP8 product, dy is rounded, times the scales of the weight's rows: Note
    [dgrad through stored values]."""
    if weight.recipe.name in ("current", "rowwise"):
        rows = weight.scale_inv.t() if weight.recipe.name == "rowwise" else torch.ones(1, 48)
        values, value = casts.quantize(dy * rows, weight.recipe.slots().grad_output)
        dy = values * value / rows
    return (dy.double() @ weight.dequantize().double()).float()


@recipes
def test_gradient_of_the_input(recipe):
    """The gradient is that of a product with what is stored; the weight has none."""
    quantized = quantize_(nn.Linear(96, 48), recipe)
    for run in (quantized, compiled(quantized)):
        x = torch.randn(5, 96, requires_grad=True)
        dy = torch.randn(5, 48)
        run(x).backward(dy)
        torch.testing.assert_close(x.grad, expected_gradient(dy, quantized.weight), rtol=1e-5, atol=1e-6)
        assert quantized.weight.grad is None and quantized.bias.grad is not None
        quantized.bias.grad = None


@recipes
def test_gradients_of_torch_func(recipe):
    """They are right, and so are those of each row and those of a gradient; `vjp` calls its backward outside of the
    transform."""
    quantized = quantize_(nn.Linear(96, 48, bias=False), recipe)
    x, dy, w = torch.randn(5, 96), torch.randn(5, 48), quantized.weight.dequantize()

    def gradients(run):
        def of_row(x, dy):
            return torch.func.grad(lambda x: (run(x) * dy).sum())(x)

        def of_squares(x):
            return torch.func.grad(lambda x: run(x).square().sum())(x).square().sum()

        return torch.func.vjp(run, x)[1](dy)[0], torch.func.vmap(of_row)(x, dy), torch.func.grad(of_squares)(x)

    expected = expected_gradient(dy, quantized.weight), dy @ w, 8 * quantized(x) @ w @ w.t() @ w
    torch.testing.assert_close(gradients(quantized), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(lambda: gradients(quantized))(), expected, rtol=1e-4, atol=1e-4)


def test_one_compile_for_any_batch():
    quantized = quantize_(model())
    run, counter = compiled(quantized), torch._dynamo.utils.counters
    counter.clear()
    with torch.no_grad():
        for rows in (8, 16, 24, 40):
            run(torch.randn(rows, 96))
    assert counter["stats"]["unique_graphs"] <= 2


@pytest.mark.codegen
def test_parameters_are_static_inputs(monkeypatch, no_caches):
    """CUDA graphs copy inputs that are not: a stored weight's parts must be among those that are, as any parameter."""
    from torch._inductor import compile_fx

    seen = []
    inner = compile_fx.compile_fx_inner

    def spy(gm, inputs, **kwargs):
        seen.append((kwargs["static_input_idxs"], [tuple(i.shape) for i in inputs if isinstance(i, torch.Tensor)]))
        return inner(gm, inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    quantized = quantize_(nn.Linear(96, 48))
    with torch.no_grad():
        compiled(quantized)(torch.randn(5, 96))
    [(static, shapes)] = seen
    assert sorted(shapes[index] for index in static) == [(), (48,), (48, 6), (48, 48)]


def test_explain():
    quantized = quantize_(model(), policy={"2": "rowwise"})
    report = te_inductor.explain(quantized, torch.randn(5, 96), options={"recipe": "none"})
    forward = [(site.fqn, site.recipe, site.kernel, site.reason) for site in report.sites if site.gemm == "fprop"]
    assert forward == [("0", "nvfp4_weight_only", "eager", None), ("2", "rowwise", "inductor", None)]


def test_the_recipe_wants_a_stored_weight():
    with pytest.warns(
        FallbackWarning,
        match=r"float32 tensor, which does not learn; te_inductor.quantize_\(model, 'nvfp4_weight_only'\)",
    ):
        compiled(model().requires_grad_(False), recipe="nvfp4_weight_only")(torch.randn(5, 96))


def test_what_cannot_be_stored():
    with pytest.raises(RecipeError, match="cannot be stored for recipe 'delayed', expected one of nvfp4_weight_only"):
        quantize_(model(), "delayed")
    with pytest.raises(RecipeError, match=r"unknown NVFP4WeightOnly\.prefill 'fp16'"):
        NVFP4WeightOnly(prefill="fp16")
    holes = model()
    holes[0].weight.data[3, 4] = torch.nan
    with pytest.warns(FallbackWarning, match="0 keeps its weight: it has values that are not finite"):
        quantize_(holes)
    assert not isinstance(holes[0].weight, NVFP4Weight) and isinstance(holes[2].weight, NVFP4Weight)
    with pytest.raises(FallbackError, match="'lm_head' matches no linear layer"):
        quantize_(model(), policy={"lm_head": "none"}, fallback="error")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fallback": "eror"}, "unknown value of option 'fallback' 'eror'; did you mean 'error'?"),
        ({"policy": ["0"]}, "option 'policy' is a list"),
        ({"policy": {5: "none"}}, "a key of option 'policy' is an int"),
        ({"policy": {"2": "mxfp8"}}, "weights cannot be stored for recipe 'mxfp8'"),
        ({"policy": {"lm_head": "none"}, "fallback": "error"}, "'lm_head' matches no linear layer"),
    ],
    ids=str,
)
def test_a_refusal_leaves_the_model_as_it_was(given, message):
    layers = model()
    with pytest.raises((OptionError, RecipeError, FallbackError), match=re.escape(message)):
        quantize_(layers, **given)
    assert not any(isinstance(p, StoredWeight) for p in layers.parameters())


def test_paths_are_those_of_the_model(recwarn):
    """What wraps it has no part in them; what is stored already is a layer too."""
    layers = model()
    quantize_(compiled(layers), "rowwise", policy={"2": "none"})
    assert isinstance(layers[0].weight, StoredWeight) and not isinstance(layers[2].weight, StoredWeight)
    quantize_(layers, "current", policy={"0": "none"})
    assert [layers[place].weight.recipe.name for place in (0, 2)] == ["rowwise", "current"]
    assert not [one for one in recwarn if issubclass(one.category, FallbackWarning)]


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_is_computed_stays(normed):
    layers, x = nn.Sequential(normed(nn.Linear(96, 48)), nn.Linear(48, 48)).eval(), torch.randn(5, 96)
    expected, keys = layers[0](x), layers.state_dict().keys()
    with pytest.warns(FallbackWarning, match="0 keeps its weight: it is computed from other parameters"):
        quantize_(layers)
    assert torch.equal(layers[0](x), expected) and layers.state_dict().keys() == keys
    assert isinstance(layers[1].weight, NVFP4Weight)


def test_tied_weights():
    """Two linear layers have one stored weight; that of an embedding and a head stays."""
    twins = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twins[1].weight = twins[0].weight
    quantize_(twins)
    assert twins[1].weight is twins[0].weight and isinstance(twins[0].weight, NVFP4Weight)
    head = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    head["head"].weight = head["embed"].weight
    with pytest.warns(FallbackWarning, match="head keeps its weight: it is also that of a module of class Embedding"):
        quantize_(head)
    assert head["head"].weight is head["embed"].weight


def test_transformers_and_adapters():
    """A model of transformers generates and compiles; adapters of peft train on it, compiled as eagerly."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    quantized, ids = quantize_(copy.deepcopy(plain)), torch.randint(0, 128, (2, 8))
    with torch.no_grad():
        expected, logits = plain(ids).logits, quantized(ids).logits
        # Each product is off by 9.5% of its norm (docs/numerics.md): by that of the head at least, but for chance, and
        # of 15 products by sqrt(15) of it at most, as their errors are independent and a residual stream amplifies
        # none.
        error = torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)
        assert 0.08 < error < 15**0.5 * 0.095
        assert torch.equal(compiled(quantized)(ids).logits, logits)
        assert quantized.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3).shape == (2, 11)
    adapted = peft.get_peft_model(quantized, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    gradients = []
    for run in (adapted, torch.compile(adapted, backend=te_inductor.te, options={"recipe": "none"})):
        adapted.zero_grad()
        run(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in adapted.parameters() if p.grad is not None])
    assert len(gradients[0]) == 8
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "low"), [("rowwise", True), ("current", True), ("block", False), (RECIPES[0], False)]
)
def test_reports_of_gradients(recipe, low):
    """dx is an FP8 GEMM where values are FP8 and scales are not those of blocks. Whichever it is, it is told."""
    stored, x = quantize_(nn.Sequential(nn.Linear(128, 128)), recipe), torch.randn(16, 128, requires_grad=True)
    kernels = {site.gemm: site.kernel for site in te_inductor.explain(stored, x).sites}
    assert kernels.keys() == {"fprop", "dgrad"}
    assert (kernels["dgrad"] != "high_precision") == low
    fast = compiled(stored)
    if low:
        te_inductor.assert_low_precision(fast, x)
    else:
        with pytest.raises(
            FallbackError, match=f"dgrad with a weight that is stored as '{recipe}' is multiplied in high"
        ):
            te_inductor.assert_low_precision(fast, x)


def test_optimizers_of_stored_weights_are_told():
    """It is said once each, of weights that no step will change; not those of what is trained beside them."""
    stored = quantize_(model(), "rowwise")
    before = stored[0].weight.dequantize().clone()
    whole = torch.optim.AdamW(stored.parameters())
    beside = torch.optim.AdamW([one for one in stored.parameters() if one.requires_grad])
    stored(torch.randn(4, 96)).sum().backward()
    with pytest.warns(
        FallbackWarning, match="2 of the 3 parameters of AdamW are weights stored in low precision"
    ) as said:
        whole.step()
        whole.step()
        beside.step()
    assert len(said) == 1
    assert torch.equal(stored[0].weight.dequantize(), before)


def test_no_training():
    weight = quantize_(model())[0].weight
    with pytest.raises(StoredWeightError, match="expected a constant"):
        weight.requires_grad_()
    with pytest.raises(StoredWeightError, match="expected a constant"):
        weight.requires_grad = True
    with pytest.raises(StoredWeightError, match="expected copy_ alone"):
        weight.mul_(2)
    with pytest.raises(StoredWeightError, match=r"copy_ from shape \(3, 3\), expected \(160, 96\)"):
        weight.copy_(torch.ones(3, 3))
    assert weight.float().norm() > 0  # anything else is done with what it stands for


def test_compiled_code_with_graph_breaks_may_catch_an_error():
    quantized, x = quantize_(model()), torch.randn(5, 96)

    @torch.compile(backend=te_inductor.te)
    def program(x):
        try:
            quantized[0].weight.requires_grad_()
        except StoredWeightError:
            return quantized(x)
        return x

    with torch.no_grad():
        assert torch.equal(program(x), quantized(x))


@recipes
def test_pickled_weights_stay_parameters(recipe):
    """The whole model, its parameters by name, plain pickle."""
    quantized, x = quantize_(model(), recipe), torch.randn(5, 96)

    def through_file(value, **options):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, **options)

    for other in (pickle.loads(pickle.dumps(quantized)), through_file(quantized, weights_only=False)):
        assert torch.equal(other(x), quantized(x)) and isinstance(other[0].weight, nn.Parameter)
    for weights_only in (False, True):
        named = through_file(dict(quantized.named_parameters()), weights_only=weights_only)
        assert all(isinstance(p, nn.Parameter) for p in named.values()) and isinstance(named["0.weight"], StoredWeight)


@recipes
def test_assigned_from_its_own_state_dict(recipe):
    quantized, other, x = quantize_(model(), recipe), quantize_(model(), recipe), torch.randn(5, 96)
    other.load_state_dict(quantized.state_dict(), assign=True)
    assert torch.equal(other(x), quantized(x)) and isinstance(other[0].weight, nn.Parameter)


@recipes
def test_sizes_are_those_that_are_stored(recipe):
    """transformers' get_memory_footprint counts so."""
    weight = quantize_(model(), recipe)[0].weight
    assert weight.nbytes == weight.stored_bytes < 2 * 96 * 160
    assert weight.numel() * weight.element_size() == pytest.approx(weight.stored_bytes, rel=1e-12)


def test_another_recipe_for_what_is_stored_is_said():
    quantized = quantize_(model(), "rowwise")
    weight = quantized[0].weight
    quantize_(quantized, "rowwise", fallback="error")
    with pytest.warns(FallbackWarning, match="0 keeps its weight: it is stored as Float8RowwiseScaling"):
        quantize_(quantized, "current")
    assert quantized[0].weight is weight


def test_files_without_subclasses_are_refused_by_name(tmp_path):
    from safetensors.torch import save_file, save_model

    quantized = quantize_(model(), "rowwise")
    for save in (
        lambda: save_file(quantized.state_dict(), tmp_path / "a"),
        lambda: save_model(quantized, tmp_path / "b"),
    ):
        with pytest.raises(
            StoredWeightError, match=r"safetensors.*quantized_state_dict\(model\).*torch.save\(model.state_dict\(\)\)"
        ):
            save()
    with pytest.raises(StoredWeightError, match="share_memory_"):
        quantized.share_memory()


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "current", "rowwise", "block"])
def test_an_exported_program_is_saved_and_loaded(tmp_path, recipe):
    quantized, x = quantize_(model(), recipe), torch.randn(5, 96)
    torch.export.save(torch.export.export(quantized, (x,)), tmp_path / "program.pt2")
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(x), quantized(x))


LOADS = """
import sys, torch, te_inductor
program, x, y = torch.export.load(sys.argv[1]).module(), *torch.load(sys.argv[2])
assert torch.equal(program(x), y)
torch.testing.assert_close(torch.compile(program, backend="te", options={"recipe": "none"})(x), y)
"""


@pytest.mark.thorough
def test_a_program_is_loaded_in_another_process(tmp_path):
    quantized, x = quantize_(model(), Float8BlockScaling(w_block_scaling_dim=1)), torch.randn(5, 96)
    torch.export.save(torch.export.export(quantized, (x,)), tmp_path / "program.pt2")
    torch.save((x, quantized(x)), tmp_path / "tensors")
    done = PLAIN.run("-c", LOADS, str(tmp_path / "program.pt2"), str(tmp_path / "tensors"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_text_of_slots():
    for recipe in (Float8CurrentScaling(), Float8RowwiseScaling(), Float8BlockScaling(), NVFP4BlockScaling()):
        assert Slots.from_text(recipe.slots().to_text()) == recipe.slots()


@pytest.mark.thorough  # test_packages.py makes one in the quick round
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "current"])
def test_a_package_of_a_quantized_model_needs_no_compile_before(recipe, tmp_path):
    command = [sys.executable, "-m", "tests.backend.packaged_program", str(tmp_path / "model.pt2"), recipe]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
