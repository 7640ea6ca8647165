"""The ways to run the blocks that `train_step` compares: `Arm.make` turns plain blocks into something to call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import importable, te_backend
from benchmarks.llama_blocks import Shape

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Arm:
    """`make(model, detail, mode, options)`; `detail` is what follows the colon of an arm's name."""

    needs: str  # package
    make: Callable[[nn.Module, str, str | None, Mapping[str, Any]], Forward]
    same_weights: bool = True  # its output can be compared with that of the plain blocks


def _bf16(model: nn.Module, detail: str, mode: str | None, options: Mapping[str, Any]) -> Forward:
    return torch.compile(model, mode=mode)


def _te(model: nn.Module, detail: str, mode: str | None, options: Mapping[str, Any]) -> Forward:
    chosen = {"recipe": detail, **options} if mode is None else {"recipe": detail, "mode": mode, **options}
    return torch.compile(model, backend=te_backend(), options=chosen)


def _torchao(model: nn.Module, detail: str, mode: str | None, options: Mapping[str, Any]) -> Forward:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(detail))
    return torch.compile(model, mode=mode)


def _te_module(model: nn.Module, detail: str, mode: str | None, options: Mapping[str, Any]) -> Forward:
    """TransformerEngine 2.8 or later: its fused layers, eager, with weights of their own instead of the blocks'."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding

    recipe = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[detail or "current"]()
    shape, parameter = model.shape, next(model.parameters())
    layers = nn.Sequential(*(_te_layer(te, shape, parameter) for _ in range(shape.layers)))
    angles = RotaryPositionEmbedding(shape.head_dim)(shape.seq).to(parameter.device)
    model.blocks = layers  # so that zeroing the model's gradients zeroes these

    def forward(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            for layer in layers:
                x = layer(x, rotary_pos_emb=angles)
        return x

    return forward


def _te_layer(te: Any, shape: Shape, like: Tensor) -> nn.Module:
    return te.TransformerLayer(
        shape.dim, shape.ffn, shape.heads, num_gqa_groups=shape.kv_heads, normalization="RMSNorm", activation="swiglu",
        bias=False, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", fuse_qkv_params=True,
        attn_input_format="bshd", params_dtype=like.dtype, device=like.device,
    )  # fmt: skip


ARMS = {
    "bf16": Arm("torch", _bf16),
    "te": Arm("te_inductor", _te),
    "torchao": Arm("torchao", _torchao),
    "te_module": Arm("transformer_engine", _te_module, same_weights=False),
}


def find(name: str) -> tuple[Arm, str]:
    """The arm of ``name`` or ``name:detail``.

    Raises:
        SystemExit: no such arm.
    """
    kind, _, detail = name.partition(":")
    if kind not in ARMS:
        raise SystemExit(f"arm {name!r}, expected one of {', '.join(ARMS)}, with :recipe behind all but bf16")
    return ARMS[kind], detail


def missing(name: str) -> str | None:
    """The package that an arm needs and that is not here."""
    arm, _ = find(name)
    return None if importable(arm.needs) else arm.needs
