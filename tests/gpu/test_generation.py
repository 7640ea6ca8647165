"""Whole language models with stored weights: prompts of each kernel family and `generate()`, against what the weights
stand for.

**Bound.** `exact` is the model in float64 with the stored values, `plain` the same in eager bf16. Both `plain` and the
compiled model round activations to bf16, at other places: twice `plain`'s error, as for any low-precision arithmetic here.
Where activations become E4M3 there are GEMMS noisy products behind a logit, each with a relative rms error of FORWARD
(tests/models/test_transformers.py derives it), and independent errors add in squares.

**Tokens** are equal, but for near ties: the exact logits of both tokens are no further apart than two errors of TAIL times
the bound's rms. Each step is compared on the tokens that were generated before it.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import te_inductor
from te_inductor.kernels.nvfp4_linear import FEW_ROWS
from tests.support import generation
from tests.support.format_errors import FORWARD, SLACK
from tests.support.generation import LAYERS, OPTIONS, STEPS, TAIL

transformers = pytest.importorskip("transformers")

GEMMS = 4 * LAYERS + 1  # one behind the other: qkv, o, gate and up, down; the head
PROMPTS = (600, 300, 128, 5, 1)
# The cases by head: the batches and prompts whose logits are compared whole, and those behind which tokens are
# generated. The layers below a head in high precision are those of the others: it has a prompt of many rows, and one of
# few, a batch.
EVERY = [(1, 600), (1, 300), (8, 128), (8, 5), (1, 1)], [(batch, length) for batch in (1, 8) for length in PROMPTS]
HEADS = {"nvfp4_weight_only": EVERY, "rowwise": EVERY, "none": ([(1, 300)], [(1, 600), (1, 5), (8, 128), (8, 1)])}


def llama(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(generation.config_of(transformers.LlamaConfig))
    return model.to(device, dtype).eval().requires_grad_(False)


class Models(generation.Models):
    """Llamas with stored weights in all layers."""

    def __init__(self, head: str, device: str = "cuda", body: str = "nvfp4_weight_only") -> None:
        transformers.logging.set_verbosity_error()
        self.head, self.body, self.device = head, body, device
        self.stored = te_inductor.quantize_(llama(device, torch.bfloat16), body, policy={"lm_head": head})
        self.plain, self.exact = llama(device, torch.bfloat16), llama(device, torch.float64)
        self.restore(self.plain, self.exact)

    def check(self, logits: Tensor, tokens: Tensor, rows: int) -> None:
        places = slice(-logits.shape[1] - 1, -1) if logits.shape[1] < tokens.shape[1] else slice(None)
        exact = self.exact(tokens, use_cache=False).logits[:, places].double()
        plain = self.plain(tokens, use_cache=False).logits[:, places].double()
        assert logits.isfinite().all()
        noise = 0.0
        if rows > FEW_ROWS or self.body != "nvfp4_weight_only":
            noise = SLACK * math.sqrt(GEMMS) * FORWARD
        elif self.head == "rowwise":
            noise = SLACK * FORWARD
        norm = torch.linalg.vector_norm
        bound = 2 * norm(plain - exact) + noise * norm(exact)
        assert norm(logits.double() - exact) <= bound, (self.head, tuple(tokens.shape))
        rms = bound / math.sqrt(exact.numel())
        found, right = logits.argmax(-1, keepdim=True), exact.argmax(-1, keepdim=True)
        gap = exact.gather(-1, right) - exact.gather(-1, found)
        assert (gap <= 2 * TAIL * rms).all(), (self.head, tuple(tokens.shape))

    def cache(self) -> object:
        """A cache of one length for all prompts, as code is compiled for each length of a cache."""
        return transformers.StaticCache(config=self.stored.config, max_cache_len=max(PROMPTS) + STEPS)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_prompts_and_generation(head, many_graphs):
    """One compiled model: each prompt's logits of all its tokens, and the tokens behind it."""
    models = Models(head)
    run = torch.compile(models.stored.forward, backend="te", dynamic=True, options=OPTIONS)
    whole, generated = HEADS[head]
    for batch, length in whole:
        tokens = models.prompt(batch, length)
        models.check(run(tokens, use_cache=False).logits, tokens, batch * length)
    models.stored.forward = run
    for batch, length in generated:
        models.generated(batch, length, disable_compile=True, past_key_values=models.cache())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_generate_compiles_by_itself(mode, many_graphs):
    """transformers compiles a step, by the configuration that it is given."""
    models = Models("nvfp4_weight_only")
    config = transformers.CompileConfig(backend="te", mode=mode, fullgraph=False, dynamic=False)
    for batch in (1, 8):
        models.generated(batch, 128, compile_config=config, cache_implementation="static")


@pytest.mark.parametrize(("body", "head"), [("rowwise", "nvfp4_weight_only"), ("current", "none"), ("block", "block")])
@torch.no_grad()
def test_generation_from_fp8_weights(body, head, many_graphs):
    """Activations are cast at every step."""
    models = Models(head, body=body)
    config = transformers.CompileConfig(
        backend="te", mode=None, options={**OPTIONS, "mode": "reduce-overhead"}, fullgraph=False, dynamic=False
    )
    for batch, length in ((1, 300), (8, 5)):
        models.generated(batch, length, compile_config=config, cache_implementation="static")
