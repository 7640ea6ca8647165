"""Small transformers models with random weights, and the machinery that holds them to the oracle."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from te_inductor.backend import parse, run_passes
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.recipes import Float8CurrentScaling
from tests.oracle import casts
from tests.uncompiled import run_rewritten

RECIPE = Float8CurrentScaling()
BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 16, 64, 128
SPREAD = HIDDEN**-0.5  # of weights: layers return what they get in size, so that residual connections do not hide them


def llama(t, layers) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        initializer_range=SPREAD,
    ))  # fmt: skip


def qwen3(t, layers) -> nn.Module:
    return t.Qwen3ForCausalLM(t.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, use_cache=False,
        initializer_range=SPREAD,
    ))  # fmt: skip


def gpt2(t, layers) -> nn.Module:
    return t.GPT2LMHeadModel(t.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=layers, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False, initializer_range=SPREAD,
    ))  # fmt: skip


def bert(t, layers) -> nn.Module:
    return t.BertModel(t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=SPREAD,
    ))  # fmt: skip


def vit(t, layers) -> nn.Module:
    return t.ViTForImageClassification(t.ViTConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, image_size=32,
        patch_size=8, num_labels=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=SPREAD,
    ))  # fmt: skip


def t5(t, layers) -> nn.Module:  # an encoder and a decoder are two
    return t.T5ForConditionalGeneration(t.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    ))  # fmt: skip


MODELS = {make.__name__: make for make in (llama, qwen3, gpt2, bert, vit, t5)}


def build(name: str, layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in fp32 and its inputs, which are floating-point so that they have gradients."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = MODELS[name](transformers, layers)
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):  # zeros until here, which would hide a lost bias
            nn.init.normal_(parameter, std=SPREAD)
    if name == "vit":
        return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
    names = ["inputs_embeds", "decoder_inputs_embeds"] if name == "t5" else ["inputs_embeds"]
    return model, {key: torch.randn(BATCH, SEQUENCE, HIDDEN) for key in names}


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its module path; transformers' Conv1D is GPT-2's."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}


def weight_of(module: nn.Module, tensor: Tensor) -> Tensor:
    """`tensor`, the weight or its gradient, as (N, K)."""
    return tensor.t() if type(module).__name__ == "Conv1D" else tensor


def rewritten(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A Dynamo backend: the passes of `te`, and what they wrote, op by op."""
    report = run_passes(Plan(gm, parse(None, {"recipe": RECIPE, "weights": "each_call"})))
    assert report.failure is None and not report.fallbacks, str(report)
    return run_rewritten(gm)


def uncompiled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """The same with AOTAutograd as in `te`, and the eager kernels in place of Inductor."""
    rewritten(gm, inputs)
    return aot_eager(gm, inputs)


@dataclass
class Run:
    """What one forward and backward gave, in float64."""

    output: Tensor
    input_grads: dict[str, Tensor]
    parameter_grads: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        inputs = {f"gradient of {name}": grad for name, grad in self.input_grads.items()}
        return {"output": self.output, **inputs, **{f"gradient of {n}": g for n, g in self.parameter_grads.items()}}


def run(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype, call: Any = None) -> Run:
    """Forward and backward; the loss is <outputs, fixed random tensor>, so every element of every output has a
    gradient."""
    leaves = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in inputs.items()}
    outputs = (model if call is None else call)(**leaves).to_tuple()
    output = torch.cat([tensor.flatten() for tensor in outputs if isinstance(tensor, Tensor)])
    dy = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    output.backward(dy.to(output.dtype))
    return Run(
        output.detach().double(),
        {name: leaf.grad.double() for name, leaf in leaves.items()},
        {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None and ".tap_" not in name},
    )


class OracleLinear(torch.autograd.Function):
    """The float64 oracle as a layer."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        y = casts.linear_forward(x.reshape(-1, x.shape[-1]), weight, bias, RECIPE)
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx, dw, db = casts.linear_backward(x.reshape(-1, x.shape[-1]), weight, RECIPE, flat)
        return dx.reshape(x.shape), dw, db if ctx.bias else None


def exact(model: nn.Module) -> nn.Module:
    """A float64 copy. (Llama's norms compute in fp32 whatever they are given; that is far below quantization noise.)"""
    return copy.deepcopy(model).double()


def oracle(model: nn.Module) -> nn.Module:
    """A float64 copy whose linear layers are the oracle's."""
    model = exact(model)
    for module in linears(model).values():
        module.forward = lambda x, module=module: OracleLinear.apply(x, weight_of(module, module.weight), module.bias)
    return model


def tap(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, nn.Module]:
    """Make every linear layer of `model` tell what it saw; returns the layers by path.

    After a forward and backward, a layer holds `seen_x` and `seen_y`; `tap_x` and `tap_y` are zeros that were added to
    its input and output, so their gradients are the dx that this layer gave and the dy that it got.
    """
    layers = linears(model)

    def shapes(module, args, y):
        module.tap_x = nn.Parameter(torch.zeros_like(args[0]))
        module.tap_y = nn.Parameter(torch.zeros_like(y))

    def before(module, args):
        x = args[0] + module.tap_x
        module.seen_x = x.detach()
        return (x,)

    def after(module, args, y):
        module.seen_y = y.detach()
        return y + module.tap_y

    handles = [module.register_forward_hook(shapes) for module in layers.values()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    for module in layers.values():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return layers
