"""`quantize_` on the 3D weights of experts: which are stored, state_dicts, products in eager and compiled code,
models of transformers that generate."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import te_inductor
from te_inductor.api.quantization import quantize_
from te_inductor.errors import FallbackWarning, StoredWeightError
from te_inductor.ops.stored_experts import Float8Experts, NVFP4Experts, PickedExperts, StoredExperts
from te_inductor.ops.stored_weight import Float8Weight, NVFP4Weight, StoredWeight
from te_inductor.runtime.eager.experts import sorted_by_expert

E, N, K = 5, 48, 96
RECIPES = ["nvfp4_weight_only", "rowwise", "current", "block"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
few_recipes = pytest.mark.parametrize(
    "recipe", [*RECIPES[:2], *(pytest.param(one, marks=pytest.mark.thorough) for one in RECIPES[2:])]
)
pytestmark = pytest.mark.usefixtures("without_tracing")


class Experts(nn.Module):
    """Each form of a product with experts' weights, of w (E, N, K) and v (E, K, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(E, N, K)), nn.Parameter(torch.randn(E, K, N))

    def forward(self, x: Tensor, ends: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        batches = x.view(E, -1, K)
        return (
            F.grouped_mm(x, self.w.transpose(-2, -1), offs=ends),
            torch._grouped_mm(x, self.v, offs=ends),
            torch.ops.transformers.grouped_mm_fallback(x, self.w.mT, ends),
            torch.bmm(self.w[ids], x.unsqueeze(-1)).squeeze(-1),
            torch.bmm(x.unsqueeze(1), self.v[ids]).squeeze(1),
            torch.matmul(x.unsqueeze(1), self.w.index_select(0, ids).transpose(1, 2)).squeeze(1),
            torch.bmm(batches, self.v).flatten(0, 1),
            batches @ self.w.permute(0, 2, 1),
            torch.einsum("mk,mnk->mn", x, self.w[ids]),  # as any other use, of what is picked
        )


FORMS = 9


@pytest.fixture(scope="module")
def inputs():
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    ids = torch.randint(0, E, (20,))
    return torch.randn(20, K), torch.tensor([3, 3, 12, 20, 20], dtype=torch.int32), ids


def stored(recipe: str, **options: object) -> Experts:
    model = quantize_(Experts(), recipe, policy={"w": recipe, "v": recipe}, fallback="error", **options)
    model.v = nn.Parameter(type(model.v).store(model.v.dequantize(), model.v.recipe, True), requires_grad=False)
    return model


def plain_of(model: nn.Module) -> nn.Module:
    """What the weights stand for."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, StoredWeight):
                module._parameters[name] = nn.Parameter(weight.dequantize().contiguous(), requires_grad=False)
    return plain


def compiled(module, **options):
    return torch.compile(module, backend=te_inductor.te, fullgraph=True, options={"recipe": "none", **options})


def bound(x: Tensor, model: Experts) -> float:
    """Sums of K exact products in fp32, each way, and roundings of scales."""
    largest = max(weight.dequantize().abs().amax() for weight in (model.w, model.v))
    return 2 * (K + 4) * 2.0**-24 * x.abs().sum(1).max().item() * largest.item()


@recipes
def test_every_form(recipe, inputs):
    """Eager code as what the weights stand for, in fp32; compiled code bit for bit as eager code, in one graph."""
    model = stored(recipe)
    plain, most = plain_of(model), bound(inputs[0], model)
    with torch.no_grad():
        found, expected = model(*inputs), plain(*inputs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=most)
        for one, other in zip(compiled(model, fallback="error")(*inputs), found, strict=True):
            assert torch.equal(one, other)
    assert len(found) == FORMS


@pytest.mark.codegen
@pytest.mark.thorough
@recipes
def test_every_form_in_code(recipe, inputs):
    model = stored(recipe)
    most = bound(inputs[0], model)
    with torch.no_grad():
        for one, other in zip(compiled(model, fallback="error")(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=most)


def test_products_are_ours(inputs, monkeypatch):
    """Nothing but the last form is done with values that are written out."""
    model, calls = stored("nvfp4_weight_only"), []
    written = NVFP4Experts.written_out
    monkeypatch.setattr(NVFP4Experts, "written_out", lambda self, parts: calls.append(1) or written(self, parts))
    with torch.no_grad():
        model(*inputs)
    assert len(calls) == 1
    assert isinstance(model.w[inputs[2]], PickedExperts) and isinstance(model.w.mT, NVFP4Experts)
    assert isinstance(model.w[2], NVFP4Weight) and isinstance(stored("rowwise").w[2], Float8Weight)
    assert torch.equal(model.w[2].dequantize(), model.w.dequantize()[2])
    assert torch.equal(model.v[2], model.v.dequantize()[2])


@recipes
def test_an_expert_is_a_stored_matrix(recipe):
    """Models loop over experts so: `F.linear` with one of them, also by a number in a tensor; each as a layer alone."""
    weight, x = torch.randn(E, N, K), torch.randn(7, K)
    model = stored(recipe)
    model.w.copy_(weight)
    alone = quantize_(nn.Linear(K, N, bias=False), recipe)
    alone.weight.copy_(weight[3])
    for number in (3, torch.tensor(3)):
        assert torch.equal(F.linear(x, model.w[number]), alone(x))
    assert torch.equal(model.w.dequantize()[3], alone.weight.dequantize())


def test_bytes():
    """4.5 bits a weight and 4 bytes an expert; 8 bits and 4 bytes a row."""
    sizes = {"nvfp4_weight_only": E * (N * K * 9 // 16 + 4), "rowwise": E * (N * K + 4 * N), "current": E * (N * K + 4)}
    for recipe, expected in sizes.items():
        for weight in (stored(recipe).w, stored(recipe).w.transpose(1, 2)):
            assert weight.stored_bytes == expected == weight.nbytes
            assert weight.numel() * weight.element_size() == pytest.approx(expected)


@recipes
def test_state_dict(recipe, inputs):
    """Saved and loaded, in each way that torch has, by its own keys; and from high precision."""
    model = stored(recipe)
    expected = model(*inputs)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for weights_only in (False, True):
        file.seek(0)
        saved = torch.load(file, weights_only=weights_only)
        assert list(saved) == ["w", "v"] and isinstance(saved["w"], StoredExperts)
        fresh, assigned = stored(recipe), Experts().requires_grad_(False)
        fresh.load_state_dict(saved)
        assigned.load_state_dict(saved, assign=True)
        for other in (fresh, assigned, copy.deepcopy(model)):
            assert all(map(torch.equal, other(*inputs), expected))
    plain = Experts()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.w, model.w.dequantize()) and torch.equal(plain.v, model.v.dequantize())
    late = Experts()
    from_plain = stored(recipe)
    from_plain.load_state_dict(late.state_dict())
    assert torch.equal(from_plain.v.mT.dequantize(), stored_as(late.v.mT, recipe).dequantize())
    with torch.device("meta"):
        late = Experts()
    late = quantize_(late, recipe, policy={"w": recipe, "v": recipe}).to_empty(device="cpu")
    late.w.copy_(model.w)
    assert torch.equal(late.w.dequantize(), model.w.dequantize())


def stored_as(weight: Tensor, recipe: str) -> StoredExperts:
    holder = nn.ParameterDict({"w": weight.detach().contiguous()})
    return quantize_(holder, recipe, policy={"w": recipe}, fallback="error")["w"]


LOADS = (
    "import sys, torch, te_inductor; print('torch._inductor' in sys.modules);"
    "saved = torch.load(sys.argv[1], weights_only=True);"
    "print([type(one).__name__ for one in saved.values()], all(one.transposed for one in saved.values()));"
    "print([one.dequantize().sum().item() for one in saved.values()])"
)


@pytest.mark.thorough  # test_stored_weights.py has one in the quick round
def test_a_process_that_only_imports_the_package_loads(tmp_path):
    saved = {name: stored(name).v for name in RECIPES}
    torch.save(saved, tmp_path / "model.pt")
    done = subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    early, kinds, sums = done.stdout.splitlines()
    assert early == "False" and kinds == "['NVFP4Experts', 'Float8Experts', 'Float8Experts', 'Float8Experts'] True"
    assert eval(sums) == [one.dequantize().sum().item() for one in saved.values()]


@few_recipes
def test_gradient_of_the_input(recipe, inputs):
    """The gradient is what autograd has for a frozen weight; the stored one has none."""
    _, ends, ids = inputs
    model = stored(recipe)
    plain, gradients = plain_of(model).requires_grad_(False), []
    for run in (plain, model, compiled(model)):
        x = inputs[0].clone().requires_grad_()
        ys = run(x, ends, ids)
        sum((y * (1 + place)).sum() for place, y in enumerate(ys)).backward()
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-3)
    with pytest.raises(StoredWeightError, match="expected a constant"):
        model.w.requires_grad_()
    with pytest.raises(StoredWeightError, match="expected copy_ alone"):
        model.w.mul_(2)


class Layer(nn.Module):
    """A router beside experts, as models have them, and what else has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 7, 16))
        self.mlp = nn.ModuleDict({"gate": nn.Linear(16, 4), "experts": nn.ParameterDict({"w": torch.randn(4, 32, 16)})})
        self.convolution, self.gate = nn.Conv1d(16, 16, 3), nn.Linear(16, 16)


def test_what_is_stored():
    """Experts by their module's name, others by a policy that names them; routers by an entry alone."""

    def kinds(fallback: str = "error", **options: object) -> dict[str, str]:
        layer = quantize_(Layer(), "rowwise", fallback=fallback, **options)
        return {name: p.recipe.name for name, p in layer.named_parameters() if isinstance(p, StoredWeight)}

    default = {"mlp.experts.w": "rowwise", "gate.weight": "rowwise"}
    assert kinds() == default
    assert kinds(policy={"mlp.gate": "current"}) == default | {"mlp.gate.weight": "current"}
    assert kinds(policy={"*.experts": "none"}) == kinds(policy={"*.experts.*": "none"}) == {"gate.weight": "rowwise"}
    assert kinds(policy={"*.experts.w": "nvfp4_weight_only"})["mlp.experts.w"] == "nvfp4_weight_only"
    assert kinds(policy={"position": "rowwise"}) == default | {"position": "rowwise"}
    sizes = []
    kinds("silent", policy={lambda name, mnk: bool(sizes.append((name, mnk))): "none"})
    assert ("mlp.experts.w", (None, 32, 16)) in sizes
    holes = Layer()
    holes.mlp["experts"]["w"].data[1, 2, 3] = torch.inf
    with pytest.warns(FallbackWarning, match="mlp.experts.w keeps its weight: it has values that are not finite"):
        quantize_(holes)


def test_sizes_of_picked_experts_that_are_transposed():
    """The transpose is found in whichever way it is written."""

    class Picks(Experts):
        def forward(self, x, ids):
            first = torch.bmm(x, self.w.index_select(0, ids).transpose(1, 2))
            return first + torch.bmm(x, torch.swapaxes(self.w.index_select(0, ids), -1, -2))

    report = te_inductor.explain(
        quantize_(Picks(), "rowwise", policy={"w": "rowwise", "v": "rowwise"}, fallback="error"),
        torch.randn(4, 1, K),
        torch.tensor([2, 0, 3, 1]),
        options={"recipe": "none"},
    )
    assert [site.shapes for site in report.sites] == [(4, N, K)] * 2


def test_explain(inputs):
    report = te_inductor.explain(stored("nvfp4_weight_only"), *inputs, options={"recipe": "none"})
    sites = [(site.fqn, site.pattern, site.recipe, site.kernel) for site in report.sites]
    assert sites.count(("w", "grouped_linear", "nvfp4_weight_only", "eager")) >= 3
    assert sites.count(("v", "grouped_linear", "nvfp4_weight_only", "eager")) >= 2


def test_torch_autocast(inputs):
    """A product of bf16 inside a region of the user's is bf16's, eager and compiled."""
    model = stored("rowwise")
    x, ends, _ = inputs

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.grouped_mm(x.bfloat16(), model.w.mT, offs=ends)

    with torch.no_grad():
        y = run(x)
        assert y.dtype == torch.bfloat16 and torch.equal(torch.compile(run, backend=te_inductor.te)(x), y)


# ---- models of transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
}


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    more = {
        "Qwen3Moe": {"intermediate_size": 128, "moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16},
        "Mixtral": {"intermediate_size": 96, "num_local_experts": 4},
        "GptOss": {"intermediate_size": 96, "num_local_experts": 4, "head_dim": 16},
    }[name]
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


ONLY_EXPERTS = {"*self_attn*": "none", "lm_head": "none"}


def generates(name: str, recipe: str, experts: str, compile_model: bool = True) -> None:
    """Tokens are those of what the weights stand for, eager and compiled."""
    model = quantize_(language_model(name), recipe, policy=ONLY_EXPERTS, fallback="error")
    weights = [p for p in model.parameters() if isinstance(p, StoredWeight)]
    assert len(weights) == 4 and all(p.transposed == (name == "GptOss") for p in weights)
    plain = plain_of(model)
    for one in (model, plain):
        one.set_experts_implementation(experts)
    prompt = torch.randint(1, 128, (2, 5))
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    arguments |= {"cache_implementation": "static", "disable_compile": True}
    expected = plain.generate(prompt, **arguments)
    assert torch.equal(model.generate(prompt, **arguments), expected)
    if compile_model:
        model.forward = torch.compile(model.forward, backend="te", options={"recipe": "none", "fallback": "error"})
        assert torch.equal(model.generate(prompt, **arguments), expected)


@pytest.mark.quick("Qwen3Moe-grouped_mm-nvfp4_weight_only")
@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "rowwise"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_generate(name, experts, recipe):
    generates(name, recipe, experts)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "rowwise"])
def test_generate_with_transposed_weights_and_loops(recipe):
    for experts in ("grouped_mm", "batched_mm", "eager"):
        generates("GptOss", recipe, experts, compile_model=experts != "eager")
    generates("Qwen3Moe", recipe, "eager", compile_model=False)


@pytest.mark.codegen
@pytest.mark.thorough
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_generate_with_code(experts):
    generates("Qwen3Moe", "nvfp4_weight_only", experts)


def test_llama4s_layout():
    """No mark, but gate's columns are twice down's rows."""
    made = nn.ParameterDict({"gate_up_proj": torch.randn(4, 64, 2 * 48), "down_proj": torch.randn(4, 48, 64)})
    layer = nn.ModuleDict({"experts": made})
    quantize_(layer, "rowwise")
    assert all(isinstance(p, Float8Experts) and p.transposed for p in layer.parameters())


def test_one_compile_for_any_number_of_rows():
    model, counter = stored("nvfp4_weight_only"), torch._dynamo.utils.counters
    run = torch.compile(lambda x, ends: F.grouped_mm(x, model.w.mT, offs=ends), backend=te_inductor.te, fullgraph=True)
    counter.clear()
    with torch.no_grad():
        for rows in (8, 16, 24, 40):
            x, ends = torch.randn(rows, K), torch.tensor([1, 1, 5, 6, rows], dtype=torch.int32)
            assert torch.equal(run(x, ends), F.grouped_mm(x, model.w.mT, offs=ends))
    assert counter["stats"]["unique_graphs"] <= 2


@pytest.mark.codegen
def test_parameters_are_static_inputs(inputs, monkeypatch, no_caches):
    """CUDA graphs copy inputs that are not."""
    from torch._inductor import compile_fx

    seen, inner = [], compile_fx.compile_fx_inner

    def spy(gm, given, **kwargs):
        shapes = [tuple(one.shape) for one in given if isinstance(one, torch.Tensor)]
        seen.append([shapes[index] for index in kwargs["static_input_idxs"]])
        return inner(gm, given, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    model, (x, ends, _) = stored("nvfp4_weight_only"), inputs
    with torch.no_grad():
        compiled(lambda x: F.grouped_mm(x, model.w.mT, offs=ends))(x)
    [static] = seen
    assert {(E, N, K // 2), (E, N, K // 16), (E,)} <= set(static)


@few_recipes
def test_an_exported_program_is_saved_and_loaded(tmp_path, recipe, inputs):
    model = stored(recipe)
    with torch.no_grad():
        torch.export.save(torch.export.export(model, inputs), tmp_path / "program.pt2")
        found = torch.export.load(tmp_path / "program.pt2").module()(*inputs)
        assert all(map(torch.equal, found, model(*inputs)))


def test_flops_are_those_of_rows(inputs):
    """A row meets one expert, whichever way the product is written."""
    import te_inductor.ops.flops  # noqa: F401

    x, ends, ids = inputs
    for recipe in ("nvfp4_weight_only", "rowwise"):
        w = stored(recipe).w
        for groups in ((ends, None), (None, ids)):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                w.product(x, *groups)
            assert counter.get_total_flops() == 2 * len(x) * N * K


def _plus_one(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    picked = model.w[ids]
    ids.add_(1)
    return torch.bmm(picked, x.unsqueeze(-1)).squeeze(-1)


def _selected(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    picked = model.w.index_select(0, ids).transpose(1, 2)
    ids.view(-1).zero_()
    return torch.bmm(x.unsqueeze(1), picked).squeeze(1)


def _copied_into(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    picked, turned = model.w[ids], model.w.detach().mT[ids]
    model.w.copy_(-model.w.dequantize() if isinstance(model.w, StoredExperts) else -model.w)
    late = torch.bmm(model.w[ids], x.unsqueeze(-1)).squeeze(-1)
    return torch.bmm(picked, x.unsqueeze(-1)).squeeze(-1) + torch.bmm(x.unsqueeze(1), turned).squeeze(1) - 3 * late


def _negative(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(model.w[ids - E], x.unsqueeze(-1)).squeeze(-1)


def _none_and_all(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    parts = slice(0), slice(None)
    return torch.cat([torch.bmm(x[part].unsqueeze(1), model.w[ids[part]].mT) for part in parts])


@few_recipes
@pytest.mark.parametrize("program", [_plus_one, _selected, _copied_into, _negative, _none_and_all])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_what_is_picked_is_what_plain_weights_give(program, recipe, compiles):
    """Whatever is written between the index and the product, and also of numbers from the end."""
    model, plain = stored(recipe), Experts().requires_grad_(False)
    plain.w.copy_(model.w.dequantize())
    run = torch.compile(program, backend="te", fullgraph=True, options={"fallback": "error"}) if compiles else program
    x, ids = torch.randn(4, K), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        found, expected = run(model, x, ids.clone()), program(plain, x, ids.clone())
    assert (found - expected).norm() < 1e-2 * expected.norm()  # of another order of sums, and of casts of -w


def test_rows_that_are_sorted_by_expert():
    """Kernels of many rows have them so: negative numbers are those of the last experts."""
    ids = torch.tensor([3, -1, 0, -5, 4])
    order, ends = sorted_by_expert(ids, E)
    assert order.tolist() == [2, 3, 0, 1, 4] and ends.tolist() == [2, 2, 2, 3, 5]


def test_picked_experts_are_read_alone():
    model, ids = stored("rowwise"), torch.tensor([1, 2])
    with torch.no_grad():
        for write in (lambda picked: picked.mul_(2), lambda picked: picked.copy_(torch.zeros(2, N, K))):
            with pytest.raises(StoredWeightError, match="expected them to be read alone"):
                write(model.w[ids])
        with pytest.raises(IndexError, match="expert 5 of 5"):
            torch.bmm(model.w[torch.tensor([5])], torch.randn(1, K, 1))
