"""Sampling from a Llama of transformers whose blocks are compiled in place, with a cache of constant size.

The caches belong to the layers one by one, so that all layers share a compiled graph, which a cache of transformers, read
by the layer's number, does not let them. On a GPU a step of decoding is captured in a CUDA graph when it has run once."""

from typing import Any

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of a layer, in place of transformers' cache of all."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        self.keys, self.values, self.places = keys, values, places

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.places, keys)
        self.values.index_copy_(2, self.places, values)
        return self.keys, self.values


class Sampler:
    """Samples answers of constant length, and the log-probabilities of their tokens."""

    def __init__(self, model: Any, batch: int, prompt: int, answer: int) -> None:
        config, like = model.config, model.lm_head.weight
        self.model, self.prompt, self.answer = model, prompt, answer
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0
        keys = prompt + answer
        self.every = torch.arange(keys, device=like.device)
        self.place = self.every[:1].clone()  # of the last token, which has not been read
        self.tokens = torch.zeros(batch, keys, dtype=torch.long, device=like.device)
        self.logs = torch.zeros(batch, keys, device=like.device)
        sizes = batch, config.num_key_value_heads, keys, model.model.layers[0].self_attn.head_dim
        self.caches = [
            (
                torch.zeros(sizes, dtype=like.dtype, device=like.device),
                torch.zeros(sizes, dtype=like.dtype, device=like.device),
            )
            for _ in model.model.layers
        ]
        for layer in model.model.layers:
            layer.self_attn.layer_idx = 0  # each has a cache to itself

    @torch.no_grad()
    def __call__(self, prompts: Tensor) -> tuple[Tensor, Tensor]:  # (B, P) to (B, P + A) and (B, A)
        self.tokens[:, : self.prompt] = prompts
        self.place.fill_(self.prompt - 1)
        self._sample(self._last_logits(prompts, self.every[: self.prompt]))
        for _ in range(self.answer - 1):
            if self.graph is None and self.runs and prompts.is_cuda:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self._step()
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
        self.runs += 1
        return self.tokens.clone(), self.logs[:, self.prompt :].clone()

    def _step(self) -> None:
        self._sample(self._last_logits(self.tokens.index_select(1, self.place), self.place))

    def _last_logits(self, ids: Tensor, places: Tensor) -> Tensor:  # (B, V)
        inner = self.model.model
        x = inner.embed_tokens(ids)
        turn = inner.rotary_emb(x, places[None])
        mask = self.every[None, None, None] <= places[:, None]
        for layer, (keys, values) in zip(inner.layers, self.caches, strict=True):
            x = layer(
                x, attention_mask=mask, past_key_values=LayerCache(keys, values, places), position_embeddings=turn
            )
        logits: Tensor = self.model.lm_head(inner.norm(x[:, -1:].contiguous()))
        return logits[:, 0]

    def _sample(self, logits: Tensor) -> None:
        logs = logits.float().log_softmax(-1)
        token = (logs.exp() / torch.empty_like(logs).exponential_()).argmax(-1, keepdim=True)
        self.place.add_(1)
        self.tokens.index_copy_(1, self.place, token)
        self.logs.index_copy_(1, self.place, logs.gather(-1, token))
