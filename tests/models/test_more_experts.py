"""Classes of transformers that no other test names, tiny and with random weights: all that share its experts, in every
way to route. Each product is found, and a step computes what tests/models/test_experts.py derives. torchtitan's layer,
too, as it is written there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import explain, ops, recipes
from tests.support import expert_models
from tests.support.autograd import results, same, te
from tests.support.expert_models import COMMON, SHARED, build, check, inputs, three
from tests.support.layers import grouped_linears

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("without_codegen", "one_seed"), pytest.mark.thorough]
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
SMALL = {"moe_intermediate_size": 48}
HEADS, ATTENTION = {"head_dim": 16}, {"layer_types": ["full_attention"]}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
CONFIGS = {
    "Afmoe": FOUR | SMALL | HEADS | ATTENTION | {"num_dense_layers": 0},
    "Cohere2Moe": FOUR | HEADS | ATTENTION | {"intermediate_size": 48},
    "DeepseekV2": SHARED
    | ONE_GROUP
    | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32}
    | {"qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16},
    "Dots1": SHARED | ONE_GROUP | HEADS,
    "Ernie4_5_Moe": SMALL | {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "ExaoneMoe": FOUR
    | SMALL
    | HEADS
    | ATTENTION
    | ONE_GROUP
    | {"num_shared_experts": 1, "first_k_dense_replace": 0, "sliding_window": 32, "mlp_layer_types": ["sparse"]},
    "FlexOlmo": FOUR | {"intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "GraniteMoe": LOCAL,
    "HunYuanMoEV1": HEADS | {"num_experts": 4, "moe_topk": 2, "intermediate_size": 48},
    "Jamba": FOUR
    | {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0}
    | {"intermediate_size": 48, "use_mamba_kernels": False},
    "Lfm2Moe": FOUR | SMALL | ATTENTION | {"num_dense_layers": 0},
    "MiniMax": LOCAL | HEADS | ATTENTION,
    "NemotronH": SMALL
    | HEADS
    | ONE_GROUP
    | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48}
    | {"layer_types": ["moe"]},
    "Olmoe": FOUR | {"intermediate_size": 48},
    "Phimoe": LOCAL,
    "Qwen2Moe": FOUR | SMALL | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "Qwen3Next": FOUR | SMALL | HEADS | ATTENTION | {"shared_expert_intermediate_size": 48},
    "SolarOpen": SHARED | ONE_GROUP | HEADS,
}
NARROW = "shared_expert_gate"  # one output


@pytest.fixture(params=CONFIGS)
def name(request, monkeypatch):
    """Makes models in evaluation: some choose at random in training. Gradients are those of training otherwise."""

    def config():
        kind = getattr(transformers, f"{request.param}Config", None)
        if kind is None:
            pytest.skip(f"this transformers has no {request.param}")
        return kind(**COMMON | CONFIGS[request.param])

    monkeypatch.setitem(expert_models.MODELS, request.param, config)
    monkeypatch.setattr(expert_models, "build", lambda name: build(name).eval())
    return request.param


def test_every_product_is_found(name):
    model, x = expert_models.build(name), inputs().requires_grad_()
    report = explain(model, inputs_embeds=x, options={"recipe": "rowwise"})
    assert report.failure is None
    first = "up_proj" if name == "NemotronH" else "gate_up_proj"
    experts = [site for site in report.sites if site.pattern == "grouped_linear"]
    found = sorted((site.fqn.rpartition(".")[2], site.gemm, site.kernel == "high_precision") for site in experts)
    gemms = ("dgrad", "fprop", "wgrad")
    assert found == [(path, gemm, False) for path in sorted((first, "down_proj")) for gemm in gemms]
    high = {site.fqn: site.reason for site in report.sites if site.outside}
    assert len(high) == 1 and "a router" in next(iter(high.values())), high


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
@pytest.mark.sample(1)
def test_a_step(name, recipe, monkeypatch):
    """The step of delayed scaling is the first, whose scales are those of the reference."""
    for high, low, found in three(name, recipe, monkeypatch, 1 if recipe == "delayed" else 2):
        check(high, low, found)


class GroupedExperts(nn.Module):
    def __init__(self, width, inner, experts) -> None:
        super().__init__()
        for name, (n, k) in {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}.items():
            setattr(self, name, nn.Parameter(torch.randn(experts, n, k) / k**0.5))
        self.low = None

    def product(self, x, weight, ends):
        if self.low is not None:
            return self.low(x, weight, ends)
        return torch._grouped_mm(x.bfloat16(), weight.bfloat16().transpose(-2, -1), offs=ends)

    def forward(self, x, ends):
        x = x if self.low is None else x.bfloat16()  # w1 and w3 have one cast
        h = F.silu(self.product(x, self.w1, ends)) * self.product(x, self.w3, ends)
        return self.product(h, self.w2, ends)


class Titan(nn.Module):
    """Experts as torchtitan 0.3 has them, models/moe: bf16 products of w1 and w3 apart, scores before or behind the
    experts, what belongs to a token added up by `scatter_add`."""

    def __init__(self, before: bool, width=64, inner=48, experts=4, each=2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))
        self.experts = GroupedExperts(width, inner, experts)
        self.shared = nn.Linear(width, width, bias=False)
        self.each, self.before = each, before

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        scores = torch.sigmoid(self.router(x).float())
        _, chosen = torch.topk(scores + self.bias, k=self.each, dim=1)
        top = scores.gather(1, chosen)
        counts = torch.histc(chosen.view(-1).float(), bins=len(self.bias), min=0, max=len(self.bias))
        order = torch.argsort(chosen.view(-1), stable=True)
        top, rows = top.view(-1)[order], order // self.each
        rows = rows.reshape(-1, 1).expand(-1, x.shape[-1])
        routed = torch.gather(x, dim=0, index=rows)
        if self.before:
            routed = (routed.float() * top.reshape(-1, 1)).to(x.dtype)
        y = self.experts(routed, torch.cumsum(counts, dim=0, dtype=torch.int32)).type_as(x)
        if not self.before:
            y = (y.float() * top.reshape(-1, 1)).to(x.dtype)
        return self.shared(x).scatter_add(0, rows, y).reshape(shape)


@pytest.mark.parametrize("before", [False, True])
def test_torchtitan(before):
    model, x = Titan(before), torch.randn(2, 24, 64, requires_grad=True)
    report = explain(model, x, options={"recipe": "current"})
    assert report.failure is None
    found = {site.fqn: site.kernel == "high_precision" for site in report.sites}
    assert found == {"router": True, "experts.w1": False, "experts.w2": False, "experts.w3": False, "shared": False}
    [reason] = {site.reason for site in report.sites if site.outside}
    assert "a router" in reason
    run = te(model, "rowwise", policy={"router": "none", "shared": "none"})
    slots, twin = recipes.resolve("rowwise").slots(), copy.deepcopy(model)

    def low(x, weight, ends):
        x = ops.mask_rows(x.bfloat16(), ends)
        return grouped_linears(x, [weight], [], ends, slots, torch.bfloat16)[0]

    twin.experts.low = low
    for _ in range(2):  # with other tokens, and other parameters behind a step of SGD
        x = torch.randn(2, 24, 64, requires_grad=True)
        found, expected = (results(one, parameters(of), x) for one, of in ((run, model), (twin, twin)))
        assert same(found, expected)
        for of in (model, twin):
            with torch.no_grad():
                for p, gradient in zip(parameters(of), expected[2:], strict=True):
                    p -= 0.1 * gradient


def parameters(model):
    return list(model.parameters())
