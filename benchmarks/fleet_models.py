"""Models of the fleet: classes of transformers at the widths of published checkpoints, a few layers deep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL_VOCABULARY = 8192


@dataclass(frozen=True)
class Model:
    """A class of transformers, its configuration, and what a batch of it is."""

    kind: str  # of `KINDS`
    model: str
    config: str
    sequence: int  # tokens of one sample
    vocabulary: int  # of the checkpoint; classes, where it sees images
    changes: dict[str, Any]
    depths: tuple[str, ...] = ("num_hidden_layers",)  # names of the numbers of layers
    vocabulary_name: str = "vocab_size"


def _decoder(family: str, sequence: int, vocabulary: int, hidden: int, ffn: int, heads: int, kv: int | None = None,
             **more: Any) -> Model:  # fmt: skip
    changes = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "max_position_embeddings": sequence, "use_cache": False, **more,
    }  # fmt: skip
    if kv is not None:
        changes["num_key_value_heads"] = kv
    return Model("tokens", f"{family}ForCausalLM", f"{family}Config", sequence, vocabulary, changes)


MODELS: dict[str, Model] = {
    "smollm-360m": _decoder("Llama", 2048, 49152, 960, 2560, 15, 5, tie_word_embeddings=True),
    "qwen3-0.6b": _decoder("Qwen3", 4096, 151936, 1024, 3072, 16, 8, head_dim=128, tie_word_embeddings=True),
    "llama-3.2-1b": _decoder("Llama", 4096, 128256, 2048, 8192, 32, 8, tie_word_embeddings=True),
    "gemma-2-2b": _decoder("Gemma2", 4096, 256000, 2304, 9216, 8, 4, head_dim=256),
    "qwen3-4b": _decoder("Qwen3", 4096, 151936, 2560, 9728, 32, 8, head_dim=128),
    "phi-3-medium": _decoder("Phi3", 4096, 32064, 5120, 17920, 40, 10, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "opt-6.7b": Model(
        "tokens", "OPTForCausalLM", "OPTConfig", 2048, 50272,
        {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "word_embed_proj_dim": 4096,
         "max_position_embeddings": 2048, "dropout": 0.0, "use_cache": False},
    ),
    "llama-3-8b": _decoder("Llama", 4096, 128256, 4096, 14336, 32, 8),
    "gemma-2-9b": _decoder("Gemma2", 4096, 256000, 3584, 14336, 16, 8, head_dim=256),
    "gpt-neox-20b": _decoder("GPTNeoX", 2048, 50432, 6144, 24576, 64),
    "bert-large": Model(
        "tokens", "BertForMaskedLM", "BertConfig", 512, 30522,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "max_position_embeddings": 512,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "vit-huge": Model(
        "image", "ViTForImageClassification", "ViTConfig", 257, 1000,
        {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "image_size": 224, "patch_size": 14},
        vocabulary_name="num_labels",
    ),
    "t5-xl": Model(
        "pair", "T5ForConditionalGeneration", "T5Config", 512, 32128,
        {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "feed_forward_proj": "gated-gelu",
         "dropout_rate": 0.0, "tie_word_embeddings": False, "use_cache": False},
        ("num_layers", "num_decoder_layers"),
    ),
    "whisper-large": Model(
        "speech", "WhisperForConditionalGeneration", "WhisperConfig", 1500, 51866,
        {"d_model": 1280, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "encoder_attention_heads": 20,
         "decoder_attention_heads": 20, "num_mel_bins": 128, "use_cache": False, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        ("encoder_layers", "decoder_layers"),
    ),
    "tiny": _decoder("Llama", 64, 256, 64, 128, 4, 2),
    # Held out: measured after the size rule and the tables of GEMMs had been made, and not used for either.
    "olmo-2-1b": _decoder("Olmo2", 4096, 100352, 2048, 8192, 16, 16),
    "starcoder2-3b": _decoder("Starcoder2", 4096, 49152, 3072, 12288, 24, 2, embedding_dropout=0.0, residual_dropout=0.0),
    "falcon-7b": Model(
        "tokens", "FalconForCausalLM", "FalconConfig", 2048, 65024,
        {"hidden_size": 4544, "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False,
         "max_position_embeddings": 2048, "use_cache": False},
    ),
    "glm-4-9b": _decoder("Glm4", 4096, 151552, 4096, 13696, 32, 2, head_dim=128, pad_token_id=0),
    "modernbert-large": Model(
        "tokens", "ModernBertForMaskedLM", "ModernBertConfig", 1024, 50368,
        {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "max_position_embeddings": 1024,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}  # fmt: skip


class Loss(nn.Module):
    """The model and its loss, one graph."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, labels: Tensor, *inputs: Tensor) -> Tensor:  # () fp32
        logits = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _tokens(of: Model, samples: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randint(4, vocabulary, (samples, of.sequence), device=device) for _ in range(2))


def _image(of: Model, samples: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    size = of.changes["image_size"]
    pixels = torch.randn(samples, 3, size, size, device=device).bfloat16()
    return torch.randint(vocabulary, (samples,), device=device), pixels


def _pair(of: Model, samples: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randint(4, vocabulary, (samples, of.sequence), device=device) for _ in range(3))


def _speech(of: Model, samples: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    features = torch.randn(samples, of.changes["num_mel_bins"], 2 * of.sequence, device=device).bfloat16()
    labels, ids = torch.randint(4, vocabulary, (2, samples, 256), device=device)
    return labels, features, ids


# What a model is called with, and what makes its labels and inputs.
KINDS: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Tensor, ...]]]] = {
    "tokens": (("input_ids",), _tokens),
    "image": (("pixel_values",), _image),
    "pair": (("input_ids", "decoder_input_ids"), _pair),
    "speech": (("input_features", "decoder_input_ids"), _speech),
}


def build(name: str, layers: int, vocabulary: int, device: str) -> Loss:
    """The same weights each time."""
    import transformers

    of = MODELS[name]
    torch.manual_seed(0)
    changes = {**of.changes, **dict.fromkeys(of.depths, layers), of.vocabulary_name: vocabulary}
    with torch.device(device):
        model = getattr(transformers, of.model)(getattr(transformers, of.config)(**changes)).bfloat16()
    return Loss(model, KINDS[of.kind][0])


def batch(name: str, tokens: int, vocabulary: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Labels and inputs of about so many tokens."""
    of = MODELS[name]
    torch.manual_seed(seed)
    return KINDS[of.kind][1](of, max(tokens // of.sequence, 1), vocabulary, device)
