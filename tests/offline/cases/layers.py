"""Linear layers, MLPs, blocks and the last layer of a language model."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.offline.cases.common import EACH, SMALL, Case, Mlp


def _mlp_training(recipe: str, **options: Any) -> Case:
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(Mlp(4096, 14336), backend="te", fullgraph=True, options={"recipe": recipe, **options}), (x,)


def mlp_training() -> Case:
    return _mlp_training("current")


def mlp_training_delayed() -> Case:
    return _mlp_training("delayed")


def mlp_training_saved() -> Case:
    """An MLP of sequences, whose gradients are views."""
    compiled, (x,) = _mlp_training("delayed", saved="low_precision")
    return compiled, (x.detach().unflatten(0, (4, -1)).requires_grad_(),)


def mlp_training_rowwise() -> Case:
    return _mlp_training("rowwise")


def mlp_training_block() -> Case:
    return _mlp_training("block")


def _two_mlps(**options: Any) -> Case:
    """The second one's norm reads what the graph has computed."""
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = nn.Sequential(Mlp(4096, 14336), Mlp(4096, 14336))
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "delayed", **options}), (x,)


def two_mlps_delayed() -> Case:
    return _two_mlps()


def two_mlps_saved_low() -> Case:
    return _two_mlps(saved="low_precision")


class OneParameter(Mlp):
    """gate and up as one layer, as Phi-3 has them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        del self.gate, self.up
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class ClampedMlp(OneParameter):
    """gpt-oss', whose one product makes gate and up in turns."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(self.norm(x))
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return x + self.down((up + 1) * (gate * torch.sigmoid(1.702 * gate)))


def clamped_mlp_saved() -> Case:
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": "delayed", "saved": "low_precision"}
    return torch.compile(ClampedMlp(4096, 14336), backend="te", fullgraph=True, options=options), (x,)


def _one_parameter(recipe: str) -> Case:
    x = torch.randn(2, 8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(OneParameter(4096, 14336), backend="te", fullgraph=True, options={"recipe": recipe}), (x,)


def one_parameter_delayed() -> Case:
    return _one_parameter("delayed")


def one_parameter_current() -> Case:
    return _one_parameter("current")


def one_parameter_rowwise() -> Case:
    return _one_parameter("rowwise")


def one_parameter_block() -> Case:
    return _one_parameter("block")


def gelu_training_delayed() -> Case:
    """GPT's MLP, with biases."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    mlp = nn.Sequential(
        nn.LayerNorm(1024, **made), nn.Linear(1024, 4096, **made), nn.GELU(), nn.Linear(4096, 1024, **made)
    )
    x = torch.randn(8192, 1024, **made, requires_grad=True)
    named = {"recipe": "delayed", "policy": {"*": "delayed"}}
    return torch.compile(mlp, backend="te", fullgraph=True, options=named), (x,)


class Head(nn.Module):
    """The last layer of a language model and its loss."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x).float(), targets)


class HeadOfSums(Head):
    """The same of logits that are computed otherwise too, which a loss in chunks is not for."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x).float() + 0.0, targets)


def _head(recipe: str, kind: type[Head] = HeadOfSums) -> Case:
    x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(16384, device="cuda", dtype=torch.int64)
    named = {"recipe": recipe, "policy": {"*": recipe}}  # by default memory forbids it, without layers in front
    return torch.compile(kind(2048, 128256), backend="te", fullgraph=True, options=named), (x, targets)


def output_loss_delayed() -> Case:
    """An output layer whose logits a loss alone reads."""
    return _head("delayed", Head)


def geglu_delayed() -> Case:
    """Gemma's MLP: GELU by tanh, times another product."""
    made = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(3584, 14336, **made), nn.Linear(3584, 14336, **made)
            self.down = nn.Linear(14336, 3584, **made)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))

    x = torch.randn(2, 4096, 3584, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    named = {"recipe": "delayed", "policy": {"*": "delayed"}}
    return torch.compile(Gated(), backend="te", fullgraph=True, options=named), (x,)


def head_current() -> Case:
    return _head("current")


def head_delayed() -> Case:
    return _head("delayed")


def head_rowwise() -> Case:
    return _head("rowwise")


def head_block() -> Case:
    return _head("block")


def mlp_inference_block() -> Case:
    run, (x,) = _mlp_training("block")
    return torch.no_grad()(run), (x,)


def mlp_training_kept() -> Case:
    return _mlp_training("current", weights="once")


def mlp_training_main_grad() -> Case:
    run, inputs = _mlp_training("current", wgrad="main_grad")
    for parameter in run.parameters():  # type: ignore[attr-defined]
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return run, inputs


def mlp_training_deferred() -> Case:
    return _mlp_training("current", wgrad="deferred")


def mlp_training_delayed_kept() -> Case:
    return _mlp_training("delayed", weights="once")


def mlp_training_mxfp8() -> Case:
    return _mlp_training("mxfp8")


def mlp_training_nvfp4() -> Case:
    return _mlp_training("nvfp4")


def small_training_nvfp4_plain() -> Case:
    """Little enough that a kernel of blocks has three dimensions, and tiles of one block."""
    from te_inductor.recipes import NVFP4BlockScaling

    with torch.device("cuda"):
        layers = (nn.Linear(128, 256, dtype=torch.bfloat16), nn.GELU(), nn.Linear(256, 128, dtype=torch.bfloat16))
        x = torch.randn(32, 128, dtype=torch.bfloat16)
    recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    options = {"policy": {"*": recipe}, **EACH}
    return torch.compile(nn.Sequential(*layers), backend="te", fullgraph=True, options=options), (x,)


def mlp_training_mxfp8_kept() -> Case:
    return _mlp_training("mxfp8", weights="once")


def linear_rowwise_fp32() -> Case:
    """fp32 output and an N to pad: the scales stand outside the GEMM."""
    x = torch.randn(80, 128, device="cuda", requires_grad=True)
    layer = nn.Linear(128, 88, device="cuda")
    return torch.compile(layer, backend="te", fullgraph=True, options=SMALL), (x,)


def linear_rowwise_padded() -> Case:
    """An N to pad: b's scales are padded with it."""
    x = torch.randn(80, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = nn.Linear(128, 88, device="cuda", dtype=torch.bfloat16)
    return torch.compile(layer, backend="te", fullgraph=True, options=SMALL), (x,)


def _linear_block(m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Case:
    x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
    layer = nn.Linear(k, n, device="cuda", dtype=dtype)
    options = {"policy": {"*": "block"}, **EACH, **options}
    return torch.compile(layer, backend="te", fullgraph=True, options=options), (x,)


def linear_block() -> Case:
    """K/128 = 4 and 8: scales of square blocks go to the GEMM as they are."""
    return _linear_block(256, 1024, 512, torch.bfloat16)


def linear_block_max_autotune() -> Case:
    """Inductor has a Triton template for such scales, which reads them in another layout."""
    return _linear_block(256, 1024, 512, torch.bfloat16, max_autotune=True)


def linear_block_fp32() -> Case:
    """fprop's K/128 is 6, no multiple of 4; M and N are to be padded."""
    return _linear_block(130, 504, 768, torch.float32)


def linear_block_one() -> Case:
    """K, N and M of one block each."""
    return _linear_block(96, 112, 128, torch.float16)


def linear_block_of_one_column() -> Case:
    """K is one block, N two: each scale of the weight is spread over 128 rows."""
    return _linear_block(32, 256, 128, torch.bfloat16)


def linear_block_dynamic() -> Case:
    """M is symbolic: padded to 4 for the GEMMs, to 128 for wgrad's contraction."""
    compiled, (x,) = _linear_block(300, 384, 512, torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    return compiled, (x,)


def llama_training_delayed() -> Case:
    """A whole block: q, k and v are one GEMM, gate and up another."""
    from benchmarks import llama_blocks

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = llama_blocks.Blocks(llama_blocks.Shape(layers=1))
    torch.set_default_dtype(default)
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    x = torch.randn(4, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "delayed"}), (x,)


class InOut(nn.Module):
    """Layers whose parameters are (in, out), as GPT-2 has them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        sizes = (dim, hidden), (hidden, dim), (hidden,)
        made = (nn.Parameter(torch.randn(size, device="cuda", dtype=torch.bfloat16)) for size in sizes)
        self.up, self.down, self.bias = made

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(torch.addmm(self.bias, x, self.up)) @ self.down


def in_out() -> Case:
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(InOut(4096, 14336), backend="te", fullgraph=True, options={"recipe": "current"}), (x,)
