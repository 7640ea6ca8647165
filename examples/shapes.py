"""Shapes of Llamas of transformers, with random weights."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Fields of a configuration."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }


SHAPES = {
    "tiny": sizes(64, 128, 1, 2, 2),
    "0.6b": sizes(1024, 3072, 28, 16, 8),  # Qwen3-0.6B's, with heads of 64
    "1b": sizes(2048, 8192, 16, 32, 8),  # Llama-3.2-1B's
    "1.7b": sizes(2048, 6144, 28, 16, 8),  # Qwen3-1.7B's
    "8b": sizes(4096, 14336, 32, 32, 8),  # Llama-3-8B's
}


def llama(
    shape: str,
    vocabulary: int,
    *,
    layers: int | None = None,  # by default all of the shape's
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,  # further fields of LlamaConfig
) -> LlamaForCausalLM:
    """A model made on its device; on all devices of a kind the same seed makes the same weights."""
    fields = SHAPES[shape] | {"vocab_size": vocabulary} | config
    if layers is not None:
        fields["num_hidden_layers"] = layers
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM._from_config(LlamaConfig(**fields), dtype=dtype)
