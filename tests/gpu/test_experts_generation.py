"""Stored experts on a GPU: the kernels of few rows against float64, and a small Qwen3-MoE with stored experts that
generates, against what its weights stand for.

**Bound of logits**, of each position that is generated: three times what the model in bf16 with the same values is
off by, in the median of positions, against float64; where x becomes FP8, for many rows of FP8 weights, the noise of
that besides (tests/models/test_transformers.py derives it). A choice of experts is a near tie now and then, of which
bf16 and float64 take different sides: a quarter of the positions may be off by more. **Tokens** of the others are
equal, but for near ties: the exact logits of both are no further apart than two errors of TAIL times the bound's
rms."""

import math

import pytest
import torch
from torch import Tensor, nn

import te_inductor
from te_inductor.kernels.grouped_mm import FEW, FEW_EACH
from te_inductor.ops.stored_experts import StoredExperts, store
from te_inductor.recipes import resolve
from tests.support import generation
from tests.support.format_errors import FORWARD, SLACK
from tests.support.generation import LAYERS, OPTIONS, TAIL, VOCABULARY

transformers = pytest.importorskip("transformers")

EXPERTS, EACH = 16, 4
GEMMS = 2 * LAYERS  # products with experts, one behind the other
PROMPTS = ((1, 128), (1, 5), (1, 1), (8, 128), (8, 1))  # batch, tokens: many rows and few, one and several
RECIPES = ("nvfp4_weight_only", "rowwise")
recipes = pytest.mark.parametrize("recipe", RECIPES)


# ---- products

SIZES = [[0, 3, 0, 17, 1, 0, 64, 0], [0, 0, 0, 70, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [16] * 8]


def weight_of(recipe: str, n: int, k: int, count: int = 8) -> StoredExperts:
    scales = torch.exp2(torch.randint(-4, 4, (count, n, 1), device="cuda"))
    whole = torch.randn(count, n, k, device="cuda") * scales / math.sqrt(k)
    return store(whole.bfloat16(), resolve(recipe), False)


def check(y: Tensor, x: Tensor, weight: StoredExperts, ids: Tensor) -> None:
    """Products are exact in fp32 and K of them are summed there, in any order; the result is rounded once."""
    wide = _doubles(weight)
    k = x.shape[1]
    for expert in ids.unique().tolist():
        rows = ids == expert
        exact = x[rows].double() @ wide[expert].t()
        sums = x[rows].double().abs() @ wide[expert].abs().t()
        eps = torch.finfo(y.dtype).eps
        most = (k + 4) * 2.0**-24 * sums + eps / 2 * 1.01 * exact.abs() + 1e-30
        assert ((y[rows].double() - exact).abs() <= most + eps * (k + 4) * 2.0**-24 * sums).all()


def _doubles(weight: StoredExperts) -> Tensor:
    """The weight as the kernels have it: fp32 scales, no rounding to the weight's dtype."""
    return weight.to(torch.float32).dequantize().double()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (200, 384), (70, 2880)], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, "current", "block"])
@torch.no_grad()
def test_few_rows(recipe, n, k):
    """Rows are given by groups and by numbers; rows of no group are zeros, whatever x holds there."""
    weight = weight_of(recipe, n, k)
    for sizes in SIZES:
        ids = torch.repeat_interleave(torch.arange(8), torch.tensor(sizes)).cuda()
        ends = torch.tensor(sizes).cumsum(0).int().cuda()
        x = torch.randn(len(ids) + 3, k, device="cuda").bfloat16()
        x[len(ids) :] = torch.nan
        torch.full((len(x), n), torch.nan, device="cuda", dtype=torch.bfloat16)  # freed: what a kernel leaves is seen
        y = torch._grouped_mm(x, weight.mT, offs=ends)
        assert (y[len(ids) :] == 0).all()
        check(y[: len(ids)], x[: len(ids)], weight, ids)
        order = torch.randperm(len(ids), device="cuda")
        found = torch.bmm(weight[ids[order]], x[order].unsqueeze(-1)).squeeze(-1)
        check(found, x[order], weight, ids[order])


@recipes
@torch.no_grad()
def test_many_rows(recipe):
    """There are more than few rows an expert: NVFP4 written out, FP8 in FP8 (x within E4M3's rounding)."""
    weight, rows = weight_of(recipe, 512, 1024), 4096
    ids = torch.randint(0, 8, (rows,), device="cuda").sort().values
    ends = torch.searchsorted(ids, torch.arange(8, device="cuda"), right=True).int()
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    assert rows > max(FEW, FEW_EACH * 8)
    order = torch.randperm(rows, device="cuda")
    exact = torch.stack([x[row].double() @ _doubles(weight)[ids[row]].t() for row in range(0, rows, 97)])
    for y in (
        torch._grouped_mm(x, weight.mT, offs=ends),
        torch.bmm(weight[ids[order]], x[order].unsqueeze(-1)).squeeze(-1)[order.argsort()],
    ):
        error = torch.linalg.vector_norm(y[::97].double() - exact) / torch.linalg.vector_norm(exact)
        assert error <= (0.04 if recipe == "rowwise" else 2.0**-7), recipe


@recipes
@torch.no_grad()
def test_cuda_graph(recipe):
    """One graph, other choices: by groups and by numbers, with experts that have no row and one that has all."""
    weight, x = weight_of(recipe, 256, 512), torch.randn(32, 512, device="cuda").bfloat16()
    ids, ends = torch.zeros(32, dtype=torch.int64, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        return torch._grouped_mm(x, weight.mT, offs=ends), torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for chosen in (torch.randint(0, 8, (32,)), torch.full((32,), 5), torch.tensor([0, 7] * 16)):
        chosen = chosen.sort().values.cuda()
        ids.copy_(chosen)
        ends.copy_(torch.searchsorted(chosen, torch.arange(8, device="cuda"), right=True))
        x.normal_()
        graph.replay()
        for y in outputs:
            check(y, x, weight, chosen)


@recipes
@torch.no_grad()
def test_nothing_waits_for_the_host(recipe):
    weight, x = weight_of(recipe, 256, 512), torch.randn(32, 512, device="cuda").bfloat16()
    ids, ends = torch.arange(32, device="cuda") % 8, (torch.arange(8, device="cuda") * 4 + 4).int()
    torch._grouped_mm(x, weight.mT, offs=ends), torch.bmm(weight[ids], x.unsqueeze(-1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch._grouped_mm(x, weight.mT, offs=ends), torch.bmm(weight[ids], x.unsqueeze(-1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- models


def qwen(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 384, "num_experts": EXPERTS, "num_experts_per_tok": EACH, "head_dim": 64}
    model = transformers.Qwen3MoeForCausalLM(generation.config_of(transformers.Qwen3MoeConfig, **sizes))
    return model.to(device, dtype).eval().requires_grad_(False)


class Models(generation.Models):
    """Models with stored experts."""

    each = EACH

    def __init__(self, recipe: str, device: str = "cuda") -> None:
        transformers.logging.set_verbosity_error()
        self.recipe, self.device = recipe, device
        only = {"*self_attn*": "none", "lm_head": "none"}
        self.stored = te_inductor.quantize_(qwen(device, torch.bfloat16), recipe, policy=only, fallback="error")
        assert sum(isinstance(one, StoredExperts) for one in self.stored.parameters()) == 2 * LAYERS
        self.plain, self.exact = qwen(device, torch.bfloat16), qwen(device, torch.float64)
        self.exact.set_experts_implementation("eager")
        self.restore(self.plain, self.exact)

    def check(self, logits: Tensor, tokens: Tensor, rows: int) -> None:
        places = slice(-logits.shape[1] - 1, -1)
        exact, plain = (model(tokens, use_cache=False).logits[:, places].double() for model in (self.exact, self.plain))
        assert logits.isfinite().all()
        many = self.recipe == "rowwise" and rows > max(FEW, FEW_EACH * EXPERTS)
        noise = SLACK * math.sqrt(GEMMS) * FORWARD if many else 0.0
        bound = 3 * (plain - exact).norm(dim=-1).median() + noise * exact.norm(dim=-1)
        near = (logits.double() - exact).norm(dim=-1) <= bound
        assert near.double().mean() >= 0.75, (self.recipe, tuple(tokens.shape))
        found, right = logits.argmax(-1, keepdim=True), exact.argmax(-1, keepdim=True)
        gap = (exact.gather(-1, right) - exact.gather(-1, found))[..., 0]
        rms = bound / math.sqrt(VOCABULARY)
        assert (gap <= 2 * TAIL * rms)[near].all(), (self.recipe, tuple(tokens.shape))


@recipes
@torch.no_grad()
def test_prompts_and_generation(recipe, many_graphs):
    """One compiled model; tokens behind each prompt."""
    models = Models(recipe)
    models.stored.forward = torch.compile(models.stored.forward, backend="te", dynamic=True, options=OPTIONS)
    for batch, length in PROMPTS:
        models.generated(batch, length, disable_compile=True, cache_implementation="static")


@recipes
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_generate_compiles_by_itself(mode, recipe, many_graphs):
    """transformers compiles a step, in which it picks experts by number, with CUDA graphs too."""
    models = Models(recipe)
    options = OPTIONS | ({"mode": mode} if mode != "default" else {})
    config = transformers.CompileConfig(backend="te", mode=None, options=options, fullgraph=False, dynamic=False)
    for batch, length in PROMPTS:
        models.generated(batch, length, compile_config=config, cache_implementation="static")
