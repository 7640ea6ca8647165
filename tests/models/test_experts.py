"""Mixtures of experts of transformers, tiny and with random weights: every expert site is found, a step computes what
eager code with the same low-precision experts computes, and a model learns as it does in high precision.

The reference is the model itself with its grouped product replaced by `ops.grouped_linears` or its batched one by
`ops.linears`. All but experts is left in high precision, and models have one layer: so the routing, which is in front of
the first low-precision product, is the same in all runs, and only the experts' noise tells them apart. With e the
reference's distance from high precision, te's distance from the reference is at most 2 ‖e‖ times the slack of
tests/models/test_transformers.py, which derives it; te is no nearer to high precision than ‖e‖ / 2 / slack; and ‖e‖
itself lies between limits of the formats."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import explain, ops, recipes
from tests.experts import MoE
from tests.models.test_transformers import BACKWARD, FORWARD, SLACK
from tests.recipes import quick

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("without_codegen", "one_seed")
thorough = pytest.mark.thorough
HIDDEN = 64
COMMON = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "initializer_range": HIDDEN**-0.5,
}  # fmt: skip
SHARED = {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}


def mixtral():
    return transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=48, head_dim=16, num_experts=8, num_experts_per_tok=2
    )


def gpt_oss():
    return transformers.GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"]
    )


def deepseek_v3():
    given = {**COMMON, **SHARED, "num_key_value_heads": 4}
    return transformers.DeepseekV3Config(
        **given, num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=16,
        v_head_dim=16, qk_nope_head_dim=16,
    )  # fmt: skip


def llama4():
    return transformers.Llama4TextConfig(
        **COMMON, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, attention_chunk_size=32, pad_token_id=0,
    )  # fmt: skip


def glm4_moe():
    return transformers.Glm4MoeConfig(**COMMON, **SHARED, head_dim=16, num_experts_per_tok=2, n_group=1, topk_group=1)


MODELS = {make.__name__: make for make in (mixtral, qwen3_moe, gpt_oss, deepseek_v3, llama4, glm4_moe)}
# The sites of experts: those of one parameter each; of Llama 4's batched products both are the module's.
SITES = {"llama4": ["experts"]}
ROUTERS = {"gpt_oss": "router", "llama4": "router"}


def build(name: str) -> nn.Module:
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
    for path, parameter in model.named_parameters():
        if "bias" in path or parameter.dim() == 3:  # zeros until here, which would hide a lost bias
            nn.init.normal_(parameter, std=HIDDEN**-0.5)
    return model


def inputs() -> torch.Tensor:
    return torch.randn(2, 16, HIDDEN)


def results(run, model, x) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(inputs_embeds=x).logits
    parameters = {path: p for path, p in model.named_parameters() if p.requires_grad}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy, allow_unused=True)
    found = {"y": y.detach(), "dx": gradients[0], **dict(zip(parameters, gradients[1:], strict=True))}
    return {path: value for path, value in found.items() if value is not None}


@pytest.mark.quick("mixtral", "gpt_oss")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=thorough) if name in ("deepseek_v3", "glm4_moe") else name for name in MODELS],
)
def test_every_expert_is_found(name):
    model, x = build(name), inputs().requires_grad_()
    report = explain(model, inputs_embeds=x, options={"recipe": "rowwise"})
    assert report.failure is None
    experts = {site.fqn: site for site in report.sites if ".experts" in site.fqn and "shared" not in site.fqn}
    ends = SITES.get(name, ["experts.gate_up_proj", "experts.down_proj"])
    assert sorted(path.partition("experts")[1] + path.partition("experts")[2] for path in experts) == sorted(ends)
    assert all(site.kernel != "high_precision" and site.recipe == "rowwise" for site in experts.values())
    gemms = [site.gemm for site in report.sites if site.fqn in experts]
    assert sorted(gemms) == sorted(2 * ["fprop", "dgrad", "wgrad"])
    [reason] = {site.reason for site in report.sites if site.fqn.endswith(ROUTERS.get(name, "mlp.gate"))}
    assert "a router" in reason
    others = [site for site in report.fallbacks if site.reason != reason]
    assert not others, others


def reference(monkeypatch, name: str) -> None:
    """Have transformers' own code multiply in low precision."""
    slots = recipes.resolve(name).slots()

    def grouped(x, weight, offs):
        [y] = ops.grouped_linears(ops.mask_rows(x, offs), [weight.transpose(1, 2)], [], offs, slots, x.dtype)
        return y

    def batched(x, weight, **_):
        return torch.stack([ops.linears(a, [b.t()], [], slots, a.dtype)[0] for a, b in zip(x, weight, strict=True)])

    monkeypatch.setattr("transformers.integrations.moe._grouped_mm", grouped)
    monkeypatch.setattr(torch, "bmm", batched)  # Llama 4's


def check(high, low, te) -> None:
    largest = max(value.norm() for path, value in high.items() if path != "y")
    assert high.keys() == low.keys() == te.keys()
    for path, exact in high.items():
        noise, size = (low[path] - exact).norm(), exact.norm()
        distance = (te[path] - low[path]).norm()
        assert te[path].isfinite().all(), path
        assert distance <= 2 * SLACK * noise + 1e-5 * max(size, 1e-3 * largest), (
            f"{path}: {distance / noise} of the quantization noise away"
        )
        if "experts" in path and path.endswith(("gate_up_proj", "down_proj")) and "shared" not in path:
            # Two operands in E4M3 give FORWARD at least; fluctuations as there.
            assert FORWARD / SLACK * size <= noise <= 3**0.5 * BACKWARD * SLACK * size, f"{path}: {noise / size:.2%}"
            assert (te[path] - exact).norm() >= noise / 2 / SLACK, f"{path}: nearer to high precision than FP8 can be"


def three(name: str, recipe: str, monkeypatch, steps=2):
    """High precision, the reference and te, step by step, each with other tokens."""
    model = build(name)
    policy = {"*.experts" if name == "llama4" else "*.experts.*": recipe, "*": "none"}
    run = torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": policy})
    for _ in range(steps):
        x = inputs()
        te, high = results(run, model, x), results(model, model, x)
        with monkeypatch.context() as patched:
            reference(patched, recipe)
            low = results(model, model, x)
        yield high, low, te


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("current", marks=thorough)])
@pytest.mark.parametrize(
    "name", [name if name == "qwen3_moe" else pytest.param(name, marks=thorough) for name in MODELS]
)
def test_a_step(name, recipe, monkeypatch):
    for high, low, te in three(name, recipe, monkeypatch):
        check(high, low, te)


def test_the_bounds_catch(monkeypatch):
    """A gradient that is dropped, one with a scale that is 25% off, and a model that never quantizes."""
    [(high, low, te)] = three("qwen3_moe", "rowwise", monkeypatch, 1)
    [path] = [path for path in te if path.endswith("down_proj")]
    for fault in (torch.zeros_like(te[path]), te[path] * 1.25):
        with pytest.raises(AssertionError, match="of the quantization noise away"):
            check(high, low, {**te, path: fault})
    with pytest.raises(AssertionError, match="than FP8 can be"):
        check(high, low, high)


class Language(nn.Module):
    """Predicts which token is next, by experts alone: what is before and behind them does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.moe, self.head = nn.Embedding(32, 32), MoE(), nn.Linear(32, 32, bias=False)
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.moe(self.embedding(tokens)))


def curve(recipe: str | None, steps: int, broken: bool = False) -> torch.Tensor:
    """Losses on a chain of tokens, whose entropy is what they tend to. Tokens, and so the routing, change each step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    chain = torch.softmax(3 * torch.randn(32, 32), -1)
    model = Language()
    policy = {"moe.gate": "none", "head": "none"}
    run = model if recipe is None else torch.compile(
        model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": policy}
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (256,))
        loss = F.cross_entropy(run(tokens), torch.multinomial(chain[tokens], 1)[:, 0])
        loss.backward()
        if broken:
            for p in model.moe.experts.parameters():
                p.grad.neg_()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


APART = {"nvfp4": 0.06, "mxfp4": 0.06}  # of the mean of the last third; 0.02 of others


@functools.cache
def in_high_precision(steps: int) -> torch.Tensor:
    return curve(None, steps)


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=thorough)])
@quick("rowwise")
def test_loss_curves(name, steps):
    """The curves are as in high precision; every step's loss is finite, and it learns."""
    if name == "block":
        pytest.skip("these experts are too narrow for blocks of 128")
    high, losses = in_high_precision(steps), curve(name, steps)
    last, tail = slice(-steps // 3, None), APART.get(name, 0.02)
    assert losses.isfinite().all()
    assert (losses[last].mean() - high[last].mean()).abs() <= tail * high[last].mean()
    assert losses[last].mean() < 0.95 * losses[0]


def test_a_wrong_gradient_shows_in_the_curve():
    wrong, high = curve("rowwise", 30, broken=True), in_high_precision(30)
    assert (wrong[-10:].mean() - high[-10:].mean()).abs() > 0.1 * high[-10:].mean()
