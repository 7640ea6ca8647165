"""What a compile costs and keeps: recompiles, fullgraph, saved tensors, shared quantizations, sub-modules,
functions."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import te_inductor
from te_inductor.backend import te
from te_inductor.lowerings.choices import choices
from te_inductor.passes import post_grad
from te_inductor.passes.graph import casts
from te_inductor.passes.pre_grad.decide import report
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    QParams,
)
from tests.passes import leave_out


class Attention(nn.Module):
    """q, k and v read one tensor."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Gated(nn.Module):
    """Two layers that are one GEMM."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return self.gate(x).relu() * self.up(x)


SQUARES = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)


@pytest.mark.quick("True-delayed", "True-rowwise", "True-squares", "False-current", "False-block", "False-nvfp4")
@pytest.mark.parametrize(
    ("recipe", "dim", "rows"),
    [
        ("current", 32, (40, 80, 120)),
        ("rowwise", 32, (40, 80, 120)),
        ("delayed", 32, (40, 80, 120)),
        ("block", 128, (50, 60, 128, 129, 300, 15)),  # up to one block of wgrad's contraction, and more
        (SQUARES, 256, (50, 60, 128, 129, 300, 15)),
        ("mxfp8", 32, (10, 15, 32, 33, 100)),
        ("nvfp4", 32, (10, 15, 16, 17, 33, 100)),
    ],
    ids=["current", "rowwise", "delayed", "block", "squares", "mxfp8", "nvfp4"],
)
@pytest.mark.parametrize("train", [True, False])
def test_any_number_of_rows_compiles_at_most_twice(train, recipe, dim, rows, without_codegen):
    check_any_number_of_rows(train, recipe, dim, rows)


@pytest.mark.parametrize(
    ("recipe", "dim", "rows"),
    [
        ("current", 32, (40, 80, 120)),
        pytest.param("delayed", 32, (40, 80, 120), marks=pytest.mark.thorough),
        pytest.param("rowwise", 32, (40, 80, 120), marks=pytest.mark.thorough),
        pytest.param("block", 128, (50, 60, 128, 129, 300, 15), marks=pytest.mark.thorough),
        pytest.param(SQUARES, 256, (50, 60, 128, 129, 300, 15), marks=pytest.mark.thorough, id="squares"),
    ],
)
def test_lowerings_do_not_hold_the_number_of_rows(recipe, dim, rows, without_cpp):
    """The others' code would take minutes."""
    check_any_number_of_rows(True, recipe, dim, rows)


def check_any_number_of_rows(train, recipe, dim, rows):
    compiles = []

    def backend(gm, inputs):
        compiles.append(gm)
        return te(gm, inputs, options={"recipe": recipe, "fallback": "silent"})

    compiled = torch.compile(Gated(dim), backend=backend, fullgraph=True)
    for size in rows:
        x = torch.randn(size, dim, requires_grad=train)
        with torch.set_grad_enabled(train):
            y = compiled(x)
        if train:
            y.sum().backward()
    assert len(compiles) <= 2


def test_an_equal_recipe_rebuilt_never_recompiles(without_codegen):
    """Dynamo compares the options of two torch.compile calls by value."""
    model = nn.Linear(32, 32)
    x = torch.randn(4, 32)
    counters.clear()
    for _ in range(3):
        recipe = Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))
        torch.compile(model, backend="te", options={"recipe": recipe})(x)
    assert counters["stats"]["unique_graphs"] == 1
    torch.compile(model, backend="te", options={"recipe": Float8CurrentScaling()})(x)
    assert counters["stats"]["unique_graphs"] == 2


def saved_tensors(compiled, x) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        compiled(x)
    return kept


@pytest.mark.parametrize("between", [nn.Identity, nn.ReLU])
def test_the_quantized_copies_are_saved_and_the_activations_are_not(between, without_cpp):
    """Columnwise copies of inputs, (K, M), as the backward casts weights itself. Behind ReLU it makes the copy and the
    mask from the GEMM's output, which takes as many bytes as both."""
    model = nn.Sequential(nn.Linear(64, 128), between(), nn.Linear(128, 64)).to(torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": "current", "weights": "each_call"}
    kept = saved_tensors(torch.compile(model, backend="te", options=options), x)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved = [(tuple(t.shape), t.dtype) for t in kept if t.dim() == 2 and t.data_ptr() not in weights]
    again = ((128, 32), torch.float8_e4m3fn) if between is nn.Identity else ((32, 128), torch.bfloat16)
    assert sorted(saved) == sorted([((64, 32), torch.float8_e4m3fn), again])


@pytest.mark.quick("True-rowwise")
@pytest.mark.parametrize(("train", "recipe"), [(True, "rowwise"), (False, "current")])
def test_q_k_and_v_share_one_quantization(train, recipe, without_cpp, monkeypatch):
    """x, the 3 weights as one, o's input and o's weight: 4 quantizations in forward, not 8."""
    counted, share = [], casts.share

    def spy(graph):
        share(graph)
        counted.append(sum("te_inductor.quantize" in str(node.target) for node in graph.nodes))

    leave_out(monkeypatch, post_grad, share, spy)
    x = torch.randn(4, 16, 32, requires_grad=train)
    with torch.set_grad_enabled(train):
        torch.compile(Attention(), backend="te", options={"recipe": recipe}, fullgraph=True)(x)
    assert counted[0] == 4


def test_explain_names_merged_layers():
    sites = te_inductor.explain(Attention(), torch.randn(4, 16, 32)).sites
    merged = {site.fqn: site.merged for site in sites}
    together = tuple(name for name, group in merged.items() if group)
    assert len(together) == 3 and all(merged[name] == together for name in together)
    assert [name for name, group in merged.items() if not group] == ["o"]


@torch.library.custom_op("te_inductor_tests::windows", mutates_args=())
def windows(x: torch.Tensor, row: int) -> torch.Tensor:
    """Pairs of rows, by strides that its caller knows, as a Triton kernel is given them."""
    return x.as_strided((x.shape[0], x.shape[1] - 1, 2, x.shape[2]), (x.stride(0), row, row, 1)).clone()


@windows.register_fake
def _(x, row):
    return x.new_empty(x.shape[0], x.shape[1] - 1, 2, x.shape[2])


@pytest.mark.parametrize("strided", ["torch", "foreign", "nothing"])
def test_slices_are_not_laid_out_anew_where_strides_are_known(strided, without_codegen):
    """Longformer's keys: sequences first, then heads first by a reshape that is a view, then windows by strides. Of a
    slice of what is merged with them the reshape is a copy."""

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.v = (nn.Linear(32, 32) for _ in range(2))

        def forward(self, x):
            keys = self.k(x).view(*x.shape[:2], 4, 8).transpose(0, 1).transpose(1, 2).reshape(-1, len(x), 8)
            found = {
                "torch": lambda: keys.as_strided((8, 7, 2, 8), (keys.stride(0), *[keys.stride(1)] * 2, 1)),
                "foreign": lambda: windows(keys, keys.stride(1)),
                "nothing": lambda: keys.unfold(1, 2, 1).transpose(-1, -2),
            }[strided]()
            return found * 1.0, keys.unfold(1, 2, 1).transpose(-1, -2) * 1.0, self.v(x).sum()

    model, x = Windows(), torch.randn(8, 2, 32)
    model.requires_grad_(False)
    found, expected, _ = torch.compile(model, backend="te", fullgraph=True)(x)
    assert torch.equal(found, expected)
    merged = {site.fqn: site.merged for site in te_inductor.explain(model, x).sites}
    assert merged["k"] == (("k", "v") if strided == "nothing" else ())


def test_explain_names_merged_layers_whose_weights_have_scales_of_their_own(monkeypatch):
    """FSDP2 gathers those of tensor-parallel layers so: they share x and the gradient's scale, and are one GEMM in
    wgrad alone (`AllGathered`)."""
    monkeypatch.setattr(report, "is_gathered", lambda weight: True)
    for site in te_inductor.explain(Attention(), torch.randn(4, 16, 32, requires_grad=True)).sites:
        assert len(site.merged) == (3 if site.gemm == "wgrad" and site.fqn != "o" else 0)


def test_submodule_function_and_decorator(without_codegen):
    x = torch.randn(4, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1] = torch.compile(model[1], backend="te")
    assert not torch.equal(model(x), nn.Sequential(model[0], model[1]._orig_mod)(x))

    @torch.compile(backend="te")
    def function(x, weight):
        return nn.functional.linear(x, weight)

    weight = torch.randn(32, 32)
    assert not torch.equal(function(x, weight), x @ weight.t())


def test_a_model_already_compiled(without_codegen):
    """Compiling a compiled model, and explaining one, mean the model inside."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    once = torch.compile(model, backend="te")
    twice = torch.compile(once, backend="te")
    torch.testing.assert_close(twice(x), once(x))
    assert [site.fqn for site in te_inductor.explain(once, x).sites if site.gemm == "fprop"] == ["0", "1"]


@pytest.mark.codegen
def test_a_graph_without_anything_of_ours_is_inductors_own():
    """What the size rule leaves alone is no slower than plain torch.compile: its forward and backward are the entries
    that plain torch.compile left in the cache."""
    from torch._dynamo.utils import counters

    model, x = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 8)), torch.randn(6, 24)
    torch.compile(model)(x).sum().backward()
    torch._dynamo.reset()
    counters.clear()
    torch.compile(model, backend="te", options={"policy": {"*": "none"}})(x).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


@pytest.mark.thorough
def test_a_detached_layer_keeps_no_gradient():
    """Merged with another it had one of zeros, by which AdamW decays its weight."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.detached, self.sorted, self.learns, self.too = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            best = self.sorted(x).tanh().argmax(-1, keepdim=True)
            return self.detached(x).sin().detach() + self.learns(x).gather(-1, best) + self.too(x).chunk(2)[0].sum()

    model = Model()
    torch.compile(model, backend="te", fullgraph=True)(torch.randn(4, 32)).sum().backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients == {"learns.weight", "learns.bias", "too.weight", "too.bias"}
    merged = {site.fqn: site.merged for site in te_inductor.explain(model, torch.randn(4, 32)).sites}
    assert merged["learns"] == ("learns", "too") and merged["detached"] == ("sorted", "detached")


def test_explain_runs_the_model_as_it_is():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1)), torch.randn(4, 32)
    state = torch.get_rng_state()
    report = te_inductor.explain(model, x, options={"policy": {"0": "none"}})
    assert torch.equal(torch.get_rng_state(), state)
    assert report.to_dict()["sites"][0]["fqn"] == "0"
    assert [site.kernel for site in report.sites] == ["high_precision"] * len(report.sites)
    # "none" is what was asked for; the head's refusal is not.
    assert {site.fqn for site in report.fallbacks} == {"2"}


def test_explaining_many_times_leaves_compiles_alone():
    """Each is a trace of the same code, which torch's limit of 8 recompiles counts unless it is kept apart."""
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    for place in range(12):
        [site] = te_inductor.explain(model, x, options={"recipe": "current" if place % 2 else "none"}).sites[:1]
        assert site.recipe == ("current" if place % 2 else "none")
    compiled = torch.compile(model, backend=lambda gm, _: gm.forward, fullgraph=True)
    compiled(x)
    te_inductor.explain(model, x)
    with torch.compiler.set_stance("fail_on_recompile"):  # what was compiled is still there
        compiled(x)


def test_a_report_leaves_nothing_behind():
    """Each used to leave a graph on the model's code, which every later call of the user's looked at."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x)

    def entries():
        return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Model.forward.__code__))

    def graphs():
        gc.collect()
        return sum(issubclass(type(one), torch.fx.GraphModule) for one in gc.get_objects())

    model, x, reports = Model(), torch.randn(4, 32), (te_inductor.explain, te_inductor.accuracy_report)
    for call in reports:
        call(model, x)
    torch.compile(model, backend="eager")(x)
    before = entries(), graphs()
    for call in reports * 2:
        call(model, x)
    assert (entries(), graphs()) == before


def test_an_equal_block_recipe_is_an_equal_constant():
    assert Float8BlockScaling() == Float8BlockScaling(fp8_quant_fwd_inp=QParams(power_2_scale=True))
    assert Float8BlockScaling().slots() == Float8BlockScaling().slots()
    source, names = Float8BlockScaling(w_block_scaling_dim=1).slots().__fx_repr__()
    assert eval(source, dict(names)) == Float8BlockScaling(w_block_scaling_dim=1).slots()


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8RowwiseScaling])
def test_split_accumulator_reaches_the_gemm(kind):
    recipe = kind(fp8_gemm_fprop=MMParams(True), fp8_gemm_dgrad=MMParams(False))
    slots = recipe.slots()
    assert (slots.fprop.fast_accum, slots.dgrad.fast_accum, slots.wgrad.fast_accum) == (False, True, False)


def test_inductor_refuses_pairs_before_their_nodes_are_looked_into():
    def asked(*_):
        raise AssertionError("asked of a pair that Inductor refuses")

    nodes = [SimpleNamespace(get_nodes=list, is_reduction=asked) for _ in range(2)]
    refusing = choices(SimpleNamespace(can_fuse=lambda *_: False), rows_alone=False)
    with V.set_graph_handler(SimpleNamespace(sizevars=SimpleNamespace(shape_env=ShapeEnv()))):
        assert not refusing.can_fuse(None, *nodes, 4)
