"""Layers whose weights are stored, in steps of generation and in prompts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.offline.cases.common import EACH, SMALL, Case, Mlp


def _stored_nvfp4(n: int, k: int) -> nn.Parameter:
    from te_inductor.ops.stored_weight import NVFP4Weight
    from te_inductor.recipes import NVFP4WeightOnly

    parts = (
        torch.empty(n, k // 2, device="cuda", dtype=torch.uint8),
        torch.empty(n, k // 16, device="cuda", dtype=torch.float8_e4m3fn),
        torch.empty((), device="cuda"),
    )
    weight = NVFP4Weight(parts, torch.Size((n, k)), torch.bfloat16, NVFP4WeightOnly())
    return nn.Parameter(weight, requires_grad=False)


def _stored_fp8(n: int, k: int) -> nn.Parameter:
    from te_inductor.ops.stored_weight import Float8Weight
    from te_inductor.recipes import Float8RowwiseScaling

    parts = (torch.empty(n, k, device="cuda", dtype=torch.float8_e4m3fn), torch.empty(n, 1, device="cuda"))
    weight = Float8Weight(parts, torch.Size((n, k)), torch.bfloat16, Float8RowwiseScaling())
    return nn.Parameter(weight, requires_grad=False)


def _decoding(
    rows: int, dynamic: bool | None = None, store: Callable[[int, int], nn.Parameter] = _stored_nvfp4
) -> Case:
    """A layer whose weights are stored, a step of generation or a prompt through it."""
    model = Mlp(4096, 14336)
    for layer in (model.gate, model.up, model.down):
        layer.weight = store(*layer.weight.shape)
    options = {"fallback": "error"}
    run = torch.compile(model.requires_grad_(False), backend="te", fullgraph=True, dynamic=dynamic, options=options)
    return run, (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16),)


def decode_nvfp4() -> Case:
    return _decoding(1)


def decode_nvfp4_batch() -> Case:
    return _decoding(16)


def decode_nvfp4_dynamic() -> Case:
    """Every size that could be a symbol is one, but the weights'."""
    return _decoding(16, dynamic=True)


def decode_fp8() -> Case:
    return _decoding(16, store=_stored_fp8)


def decode_fp8_dynamic() -> Case:
    return _decoding(5, dynamic=True, store=_stored_fp8)


def batch_fp8() -> Case:
    return _decoding(40, store=_stored_fp8)


def narrow_fp8() -> Case:
    """Rows of x that cuBLASLt multiplies by gate and up, and our kernel by down."""
    return _decoding(100, store=_stored_fp8)


def narrow_fp8_training() -> Case:
    """A narrow layer, whose weight is cast, with a graph that has a backward."""
    model = nn.Linear(4096, 2560, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={**SMALL, **EACH}), (x,)


def decode_attention_nvfp4() -> Case:
    """Grouped queries that share a cache, of which only a part counts, and a vocabulary whose largest logit is asked
    for."""
    linear = nn.functional.linear

    def step(x: Tensor, query: Tensor, head: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        q = linear(x, query).view(2, 8, 4, 128)
        scores = (q @ keys.transpose(2, 3)).float() * 128**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
        return linear((weights @ values).reshape(2, 4096), head).argmax(-1)

    cache = torch.empty(2, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 1024, device="cuda", dtype=torch.bool)
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(step, backend="te", fullgraph=True, options={"fallback": "error"})
    return run, (x, _stored_nvfp4(4096, 4096), _stored_nvfp4(32768, 4096), cache, torch.empty_like(cache), mask)


class Families(nn.Module):
    """Layers beside each other, each with an input of its own."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers.values(), inputs, strict=True))


def every_family() -> Case:
    """Each family of kernels once, in one graph: stored NVFP4 by each kernel for few rows, by FP8 as it is multiplied,
    and cast to FP8 first; stored FP8 of few rows; each recipe."""
    stored = {
        "direct": (1, 4096),
        "streamed": (16, 4096),
        "plain": (16, 1088),
        "prompt": (200, 4096),
        "recast": (1024, 4096),
    }
    weights = {name: (rows, _stored_nvfp4(1024, k)) for name, (rows, k) in stored.items()}
    weights["fp8"] = (16, _stored_fp8(1024, 4096))
    made = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    layers, inputs = nn.ModuleDict(), []
    for name, (rows, weight) in weights.items():
        layers[name] = nn.Linear(weight.shape[1], 1024, **made)
        layers[name].weight = weight
        inputs.append(torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16))
    recipes = ("current", "rowwise", "delayed", "block", "mxfp8", "nvfp4")
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    for name in recipes:
        layers[name] = nn.Linear(512, 256, **made).requires_grad_(False)
        inputs.append(x)
    options = {"policy": {f"layers.{name}": name for name in recipes}}
    return torch.compile(Families(layers), backend="te", fullgraph=True, options=options), tuple(inputs)


def prompt_nvfp4() -> Case:
    return _decoding(200)


def prompt_nvfp4_dynamic() -> Case:
    return _decoding(200, dynamic=True)


def prefill_nvfp4() -> Case:
    return _decoding(4096)
