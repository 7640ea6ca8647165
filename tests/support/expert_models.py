"""Models of experts of transformers, made tiny, and the errors that they may have."""

import pytest
import torch
from torch import nn

from te_inductor import ops, recipes
from tests.support.format_errors import BACKWARD, FORWARD, SLACK
from tests.support.layers import grouped_linears, linears

transformers = pytest.importorskip("transformers")


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


def reference(monkeypatch, name: str) -> None:
    """Have transformers' own code multiply in low precision."""
    slots = recipes.resolve(name).slots()

    def grouped(x, weight, offs):
        [y] = grouped_linears(ops.mask_rows(x, offs), [weight.transpose(1, 2)], [], offs, slots, x.dtype)
        return y

    def batched(x, weight, **_):
        return torch.stack([linears(a, [b.t()], [], slots, a.dtype)[0] for a, b in zip(x, weight, strict=True)])

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
