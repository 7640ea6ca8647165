"""Models whose CUDA code the offline tests read. Each returns a compiled model and its inputs on the device "cuda"."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_inductor import ops, recipes
from te_inductor.distributed import casts
from te_inductor.ops.gathered_weight import GatheredWeight

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


SMALL = {"policy": {"*": "rowwise"}}  # named by the policy, a site may be too small to pay
EACH = {"weights": "each_call"}  # in graphs whose casts of weights are looked at


class Mlp(nn.Module):
    """RMSNorm, gate and up, SwiGLU, down: every producer that a quantization meets in a transformer."""

    def __init__(self, dim: int, hidden: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        made = {"bias": bias, "device": "cuda", "dtype": dtype}
        self.norm = nn.RMSNorm(dim, device="cuda", dtype=dtype)
        self.gate, self.up = nn.Linear(dim, hidden, **made), nn.Linear(dim, hidden, **made)
        self.down = nn.Linear(hidden, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def _mlp_training(recipe: str, **options: Any) -> Case:
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(Mlp(4096, 14336), backend="te", fullgraph=True, options={"recipe": recipe, **options}), (x,)


def mlp_training() -> Case:
    return _mlp_training("current")


def mlp_training_delayed() -> Case:
    return _mlp_training("delayed")


def mlp_training_rowwise() -> Case:
    return _mlp_training("rowwise")


def mlp_training_block() -> Case:
    return _mlp_training("block")


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


def _head(recipe: str) -> Case:
    x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(16384, device="cuda", dtype=torch.int64)
    named = {"recipe": recipe, "policy": {"*": recipe}}  # by default memory forbids it, without layers in front
    return torch.compile(Head(2048, 128256), backend="te", fullgraph=True, options=named), (x, targets)


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


def cutlass_residual() -> Case:
    return mlp_training_delayed()


def cutlass_residual_block() -> Case:
    return mlp_training_block()


def cutlass_quantized() -> Case:
    """GELU's MLP in inference, within a factor of two of what the table has."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    model = nn.Sequential(nn.Linear(512, 2048, **made), nn.GELU(), nn.Linear(2048, 512, **made))
    run = torch.compile(model, backend="te", fullgraph=True, options={"policy": {"*": "delayed"}})
    return torch.no_grad()(run), (torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16),)


def cutlass_main_grad() -> Case:
    return mlp_training_main_grad()


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


def _two_way_cast(rows: int, columns: int, scope: str = "tensor") -> Case:
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        return ops.quantize_rowcol(x, Quantizer("e4m3", scope=scope))

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return torch.compile(function, backend="te", fullgraph=True), (x,)


def amax_of_swiglu() -> Case:
    """Of Llama-3.2-1B's width, which Inductor would cut into uneven parts."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def scale(h: Tensor) -> Any:
        gate, up = h.chunk(2, 1)
        return ops.current_scale([nn.functional.silu(gate) * up], Quantizer("e4m3"))

    h = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    return torch.compile(scale, backend="te", fullgraph=True), (h,)


def two_way_cast() -> Case:
    """Nothing in front; a size that fills no tile."""
    return _two_way_cast(80, 144)


def two_way_cast_padded() -> Case:
    """Both copies need padding."""
    return _two_way_cast(70, 137)


def two_way_cast_rowwise() -> Case:
    return _two_way_cast(80, 144, scope="row")


def two_way_cast_rowwise_padded() -> Case:
    return _two_way_cast(70, 137, scope="row")


def _pieces(scope: str, dim: int, size: int = 128) -> Case:
    """Three matrices side by side, each computed into its place; as merged layers cast their weights and gradients."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(*pieces: Tensor) -> Any:
        return ops.quantize_pieces([piece.abs() for piece in pieces], dim, Quantizer("e4m3", scope=scope))

    sizes = [[size, size] for _ in range(3)]
    sizes[1][dim] *= 2
    pieces = tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return torch.compile(function, backend="te", fullgraph=True), pieces


def pieces_of_rows() -> Case:
    """Beside each other, so that they share the scales of their rows, and not those of their columns."""
    return _pieces("row", 1, 48)


def pieces_of_blocks() -> Case:
    return _pieces("1x128", 1)


def pieces_of_squares() -> Case:
    """Below each other, as weights."""
    return _pieces("128x128", 0)


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


def _recording_cast(rows: int, columns: int) -> Case:
    """Delayed scaling: both copies and the amax from one read, the scale given."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(amax: Tensor, x: Tensor, scale: Tensor) -> Any:
        ops.record_amax([x], amax)
        return *ops.quantize_rowcol_delayed(x, scale, Quantizer("e4m3")), amax + 0.0

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(function, backend="te", fullgraph=True), (amax, x, scale)


def recording_cast() -> Case:
    return _recording_cast(80, 144)


def recording_cast_padded() -> Case:
    return _recording_cast(70, 137)


def rows_that_record() -> Case:
    """As a norm is under delayed scaling, but with a statistic that is exact: the row copy and the amax of what depends
    on the whole row. A row that does not fill its program."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor, amax: Tensor, scale: Tensor) -> Any:
        wide = x.float()
        centred = wide - wide.amax(1, keepdim=True)
        ops.record_amax([centred], amax)
        return ops.quantize_rowcol_delayed(centred, scale, Quantizer("e4m3"))[0], amax + 0.0

    x = torch.randn(40, 1104, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(function, backend="te", fullgraph=True), (x, amax, scale)


def _cast_of_three(transposed: bool) -> Case:
    """Three tensors are read, so that one copy is stored in pairs of rows; a size that fills no tile."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(y: Tensor, z: Tensor, x: Tensor, scale: Tensor) -> Any:
        chosen = torch.where(y > z, x, x.abs())
        return ops.quantize_rowcol_delayed(chosen.t() if transposed else chosen, scale, Quantizer("e4m3"))

    x, y, z = (torch.randn(80, 144, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return torch.compile(function, backend="te", fullgraph=True), (y, z, x, torch.ones((), device="cuda"))


def cast_of_three() -> Case:
    return _cast_of_three(transposed=False)


def cast_of_three_transposed() -> Case:
    """The row copy is in pairs."""
    return _cast_of_three(transposed=True)


def two_way_cast_block() -> Case:
    """Whole blocks, the tiles of one kernel."""
    return _two_way_cast(256, 384, scope="1x128")


def two_way_cast_block_padded() -> Case:
    """Blocks that are cut off, two of them in a row."""
    return _two_way_cast(20, 137, scope="1x128")


def two_way_cast_squares() -> Case:
    return _two_way_cast(256, 384, scope="128x128")


def two_way_cast_squares_padded() -> Case:
    return _two_way_cast(137, 70, scope="128x128")


def two_way_cast_block_of_heads() -> Case:
    """A matrix that is a view of what is computed, as attention's output is, of (batch, heads, sequence, 128). Scales
    are powers of two."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        matrix = x.abs().transpose(1, 2).reshape(256, 384)
        return ops.quantize_rowcol(matrix, Quantizer("e4m3", power_2_scale=True, scope="1x128"))

    x = torch.randn(4, 3, 64, 128, device="cuda", dtype=torch.bfloat16)
    return torch.compile(function, backend="te", fullgraph=True), (x,)


def _rows_of_blocks(rows: int, op: str = "quantize_rowcol", of_another: bool = False) -> Case:
    """As a norm's row copy is, but with a statistic that is exact. Rows that do not fill their programs."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor, y: Tensor) -> Any:
        wide, other = x.float(), y.float()
        centred = wide - (other if of_another else wide).amax(1, keepdim=True)
        return getattr(ops, op)(centred, Quantizer("e4m3", scope="1x128"))[:2]

    x, y = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (1280, 384))
    return torch.compile(function, backend="te", fullgraph=True), (x, y)


def rows_of_blocks() -> Case:
    return _rows_of_blocks(128)


def rows_of_blocks_inference() -> Case:
    """Any number of rows."""
    return _rows_of_blocks(5, "quantize")


def rows_of_blocks_dynamic() -> Case:
    run, (x, y) = rows_of_blocks_inference()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    return run, (x, y)


def rows_of_blocks_of_another() -> Case:
    """What reduces another tensor holds no rows of this one."""
    return _rows_of_blocks(200, "quantize", of_another=True)


def columns_of_blocks() -> Case:
    """As the backward makes them of what the forward computed: tiles that are blocks in one dimension."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        _, _, data, scale_inv = ops.quantize_rowcol(x.abs() + 0.0, Quantizer("e4m3", scope="1x128"))
        return data, scale_inv

    return torch.compile(function, backend="te", fullgraph=True), (
        torch.randn(256, 384, device="cuda", dtype=torch.bfloat16),
    )


def row_cast_squares() -> Case:
    """As of a weight, in inference: whole blocks, one read."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    return torch.compile(lambda x: ops.quantize(x, Quantizer("e4m3", scope="128x128")), backend="te", fullgraph=True), (
        x,
    )


def columnwise_cast_block() -> Case:
    """The transposed copy alone, as of dy where only the weight wants a gradient; two blocks in its rows."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(x: Tensor) -> Any:
        return ops.quantize(x.t(), Quantizer("e4m3", scope="1x128"))

    return torch.compile(function, backend="te", fullgraph=True), (
        torch.randn(130, 20, device="cuda", dtype=torch.bfloat16),
    )


def two_way_cast_mxfp8() -> Case:
    """Whole blocks."""
    return _two_way_cast(64, 96, scope="1x32")


def two_way_cast_mxfp8_padded() -> Case:
    return _two_way_cast(20, 70, scope="1x32")


def two_way_cast_mxfp8_squares() -> Case:
    return _two_way_cast(40, 70, scope="32x32")


def _nvfp4_casts(rows: int, columns: int, scope: str, stochastic: bool) -> Case:
    """Both copies, and the transform of the transpose; as of a gradient, or of a weight."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    quantizer = Quantizer("e2m1", scope=scope, stochastic=stochastic)

    def function(x: Tensor, amax: Tensor, seed: Tensor) -> Any:
        if not stochastic:
            return ops.quantize_rowcol(x, quantizer, amax)
        copies = (ops.quantize(matrix, quantizer, amax, seed) for matrix in (x, x.t()))
        return *next(copies), *next(copies), ops.hadamard(x.t()), ops.tensor_amax(x)

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    amax, seed = torch.ones((), device="cuda"), torch.ones((), device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (x, amax, seed)


def nvfp4_gradient() -> Case:
    return _nvfp4_casts(20, 70, "1x16", stochastic=True)


def nvfp4_input() -> Case:
    return _nvfp4_casts(32, 64, "1x16", stochastic=False)


def nvfp4_weight() -> Case:
    return _nvfp4_casts(20, 70, "16x16", stochastic=False)


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


def more_rows_fp8() -> Case:
    return _decoding(65, store=_stored_fp8)


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


def _linear_blackwell(recipe: str, columns: int = 88, **options: Any) -> Case:
    """Two tiles of rows of scales, two of blocks; an N to pad."""
    layer = nn.Linear(160, columns, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(130, 160, device="cuda", dtype=torch.bfloat16)
    return torch.compile(layer, backend="te", fullgraph=True, options={"policy": {"*": recipe}, **options}), (x,)


def linear_blackwell_mxfp8() -> Case:
    return _linear_blackwell("mxfp8")


def linear_blackwell_nvfp4() -> Case:
    return _linear_blackwell("nvfp4")


def cutlass_blackwell_nvfp4() -> Case:
    return _linear_blackwell("nvfp4", 144, max_autotune=True)


def cutlass_training(recipe: str = "current") -> Case:
    layer = nn.Linear(4096, 6144, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(layer, backend="te", fullgraph=True, options={"recipe": recipe}), (x,)


def cutlass_blocks() -> Case:
    return cutlass_training("block")


def _gated(run: Callable[[Mlp, Tensor], Tensor] = lambda model, x: model(x), bias: bool = False) -> Case:
    model = Mlp(2048, 8192, bias)
    x = torch.randn(4, 4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": "block", **EACH}
    return torch.compile(lambda x: run(model, x), backend="te", fullgraph=True, options=options), (x,)


def cutlass_gated() -> Case:
    """x has three dimensions."""
    return _gated()


def cutlass_gated_checkpointed() -> Case:
    """gate and up are computed again by the backward."""
    return _gated(lambda model, x: checkpoint(model, x, use_reentrant=False))


def cutlass_gated_bias() -> Case:
    """The biases' gradients are sums of gate's and up's."""
    return _gated(bias=True)


def checkpointed_block() -> Case:
    """The backward alone wants down's column copy, and no row copy."""
    return cutlass_gated_checkpointed()


class Experts(nn.Module):
    """A router, rows sorted by expert, SwiGLU between two grouped products, and the way back."""

    def __init__(self, dim: int, hidden: int, experts: int, each: int) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.experts, self.each = experts, each
        self.router = nn.Linear(dim, experts, bias=False, **made)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, dim, **made))
        self.down = nn.Parameter(torch.randn(experts, dim, hidden, **made))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.each)
        ids, order = chosen.flatten().sort()
        ends = torch.histc(ids.int(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // self.each]
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        y = y * weights.flatten()[order].to(y.dtype)[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return y[back].view(x.shape[0], self.each, -1).sum(1)


def _experts(recipe: str) -> Case:
    x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = Experts(2048, 768, 128, 8)
    return torch.compile(
        model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": {"router": "none", "*": recipe}}
    ), (x,)


def experts_delayed() -> Case:
    return _experts("delayed")


def experts_current() -> Case:
    return _experts("current")


def experts_rowwise() -> Case:
    return _experts("rowwise")


def experts_block() -> Case:
    return _experts("block")


def experts_mxfp8() -> Case:
    return _experts("mxfp8")


def experts_mxfp4() -> Case:
    return _experts("mxfp4")


def experts_nvfp4() -> Case:
    return _experts("nvfp4")


class GroupedLinear(nn.Module):
    """One layer of experts, whose rows come sorted."""

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


def _grouped_blackwell(recipe: recipes.Recipe, trains: bool = True) -> Case:
    """Rows that fill no tile, behind the groups too; two tiles of a weight's rows of scales, and of blocks."""
    x = torch.randn(150, 96, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
    ends = torch.empty(3, device="cuda", dtype=torch.int32)
    model = GroupedLinear(3, 160, 96).requires_grad_(trains)
    return torch.compile(model, backend="te", fullgraph=True, options={"policy": {"*": recipe}}), (x, ends)


def grouped_blackwell_mxfp8() -> Case:
    return _grouped_blackwell(recipes.MXFP8BlockScaling())


def grouped_blackwell_mxfp4() -> Case:
    return _grouped_blackwell(recipes.MXFP4BlockScaling(disable_stochastic_rounding=True))


def grouped_blackwell_nvfp4() -> Case:
    return _grouped_blackwell(recipes.NVFP4BlockScaling(disable_stochastic_rounding=True))


def grouped_blackwell_inference() -> Case:
    return _grouped_blackwell(recipes.NVFP4BlockScaling(), trains=False)


class PickedExperts(Experts):
    """The same with the matrices of each row picked, as transformers has it for a step of generation."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.each)
        ids, rows = chosen.flatten(), x.repeat_interleave(self.each, 0)
        gate, up = torch.bmm(self.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[ids], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.flatten().to(y.dtype)[:, None]).view(x.shape[0], self.each, -1).sum(1)


def _stored_experts(recipe: str, tokens: int, kind: type[Experts] = Experts, dynamic: bool | None = None) -> Case:
    from te_inductor.ops.stored_experts import Float8Experts, NVFP4Experts
    from te_inductor.recipes import Float8RowwiseScaling, NVFP4WeightOnly

    model = kind(256, 128, 16, 2)
    for name in ("gate_up", "down"):
        shape = getattr(model, name).shape
        e, n, k = shape
        if recipe == "nvfp4":
            scales = torch.empty(e, n, k // 16, device="cuda", dtype=torch.float8_e4m3fn)
            parts = torch.empty(e, n, k // 2, device="cuda", dtype=torch.uint8), scales, torch.empty(e, device="cuda")
            weight: Tensor = NVFP4Experts(parts, shape, torch.bfloat16, NVFP4WeightOnly())
        else:
            values = torch.empty(e, n, k, device="cuda", dtype=torch.float8_e4m3fn)
            weight = Float8Experts(
                (values, torch.empty(e, n, device="cuda")), shape, torch.bfloat16, Float8RowwiseScaling()
            )
        setattr(model, name, nn.Parameter(weight, requires_grad=False))
    options = {"recipe": "none", "fallback": "error"}
    run = torch.compile(model.requires_grad_(False), backend="te", fullgraph=True, dynamic=dynamic, options=options)
    return run, (torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16),)


def decode_experts_nvfp4() -> Case:
    return _stored_experts("nvfp4", 8)


def decode_picked_nvfp4() -> Case:
    return _stored_experts("nvfp4", 8, PickedExperts)


def decode_picked_fp8() -> Case:
    return _stored_experts("fp8", 8, PickedExperts)


def decode_experts_dynamic() -> Case:
    return _stored_experts("fp8", 8, dynamic=True)


def prompt_experts_nvfp4() -> Case:
    return _stored_experts("nvfp4", 512)


def prompt_experts_fp8() -> Case:
    return _stored_experts("fp8", 512)


def _gathered(recipe: str) -> Case:
    """Weights as FSDP2 gathered them in FP8."""
    model, made = Mlp(4096, 14336), recipes.resolve(recipe)
    for layer in (model.gate, model.up, model.down):
        shape = layer.weight.shape
        values = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        scale_inv = torch.empty(made.slots().weight.granularity.scale_shape(*shape), device="cuda")
        layer.weight = nn.Parameter(GatheredWeight(values, scale_inv, shape, torch.bfloat16, made))
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, "fallback": "error"}), (x,)


def gathered_mlp() -> Case:
    return _gathered("current")


def gathered_mlp_block() -> Case:
    return _gathered("block")


def shard_casts() -> Case:
    """Of two weights' rows, fp32, that FSDP would gather in bf16: one with one scale, one with those of blocks."""
    rows = [torch.empty(2048, 4096, device="cuda"), torch.empty(7168, 4096, device="cuda")]
    scales = [torch.empty((), device="cuda"), torch.empty((112, 32), device="cuda")]
    whole, blocks = ((first, torch.bfloat16, block, 448.0, torch.float8_e4m3fn) for first, block in _SHARDS)
    compiled = torch.compile(lambda *all: casts._casts(all[:2], all[2:], [whole, blocks]), options=casts.EXACT)
    return compiled, (*rows, *scales)


_SHARDS = ((2048, (0, 0)), (7168, (128, 128)))


def column_sums() -> Case:
    """An activation's gradient, its casts both ways and its sums over rows; sizes that no tile divides. What a kernel
    reads outside of them, zeros, would add to the sums."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > 0, dy, torch.where(x < 0, dy.abs(), 0.5))
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32))

    x, dy = (torch.randn(208, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return torch.compile(run, backend="te", fullgraph=True), (x, dy, torch.ones((), device="cuda"))


def column_sums_padded() -> Case:
    """Rows that are no multiple of 16, and the amax: all of it of the tensor with rows of zeros."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, dy: Tensor, amax: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > 0, dy, torch.where(x < 0, dy.abs(), 0.5))
        ops.record_amax([dx], amax)
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32), amax + 0.0)

    x, dy = (torch.randn(201, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(run, backend="te", fullgraph=True), (x, dy, amax, scale)


def column_sums_transposed() -> Case:
    """Of tensors that lie in columns, three of them: pairs of rows."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, y: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > y, dy, dy.abs()).t()
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32))

    tensors = [torch.randn(144, 208, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return torch.compile(run, backend="te", fullgraph=True), (*tensors, torch.ones((), device="cuda"))


def column_sums_of_pieces() -> Case:
    """As of q, k and v, each with a bias."""
    quantizer = recipes.Quantizer("e4m3")

    def run(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        pieces = [q.abs(), k.abs()]
        sums = [piece.sum(0, dtype=torch.float32) for piece in pieces]
        return (*ops.quantize_pieces_delayed(pieces, 1, scale, quantizer), *sums)

    q, k = (torch.randn(208, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return torch.compile(run, backend="te", fullgraph=True), (q, k, torch.ones((), device="cuda"))


class Biased(nn.Module):
    """LayerNorm and an MLP with biases, as of GPT-NeoX and OPT."""

    def __init__(self, dim: int, hidden: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm, self.function = nn.LayerNorm(dim, **made), function
        self.up, self.down = nn.Linear(dim, hidden, **made), nn.Linear(hidden, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(self.norm(x))))


def _biased(recipe: str, function: Callable[[Tensor], Tensor]) -> Case:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = Biased(4096, 16384, function)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe}), (x,)


def biased_gelu_delayed() -> Case:
    return _biased("delayed", nn.functional.gelu)


def biased_gelu_current() -> Case:
    return _biased("current", nn.functional.gelu)


def biased_relu_delayed() -> Case:
    return _biased("delayed", nn.functional.relu)


class BiasedBlock(nn.Module):
    """LayerNorm, attention, and an MLP of ReLU with biases, as of OPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm, self.mlp = nn.LayerNorm(dim, **made), Biased(dim, 4 * dim, nn.functional.relu)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, **made) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim)
        h = self.norm(x)
        heads = [layer(h).unflatten(-1, (-1, 128)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        # By name: without a device torch chooses the way that has all scores in memory.
        out = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]
        return self.mlp(x + self.o(out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _biased_blocks(**settings: Any) -> Case:
    x = torch.randn(4, 2048, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(nn.Sequential(BiasedBlock(4096), BiasedBlock(4096)), fullgraph=True, **settings), (x,)


def biased_blocks_bf16() -> Case:
    return _biased_blocks()


def biased_blocks_delayed() -> Case:
    return _biased_blocks(backend="te", options={"recipe": "delayed"})


def biased_blocks_current() -> Case:
    return _biased_blocks(backend="te", options={"recipe": "current"})


def _async_tp(recipe: str, batch: int = 1, bias: bool = False, **options: Any) -> Case:
    """Rank 0 of two, sequence parallel, of a process group that sends nothing."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed import _symmetric_memory
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    dist.is_nccl_available = lambda: True
    _symmetric_memory._is_test_mode = True  # the group is taken for one with symmetric memory
    with unset_fake_temporarily():
        mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(Mlp(4096, 14336, bias))
    into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {"norm": SequenceParallel(), "gate": into, "up": into, "down": out}
    parallelize_module(model[0], mesh, plan)  # type: ignore[arg-type]
    x = torch.randn(batch, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, **options}), (x,)


def graph_fsdp() -> Case:
    """Rank 0 of two, which gather weights of which each has half of the rows."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.simple_fsdp import simple_fsdp

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    with unset_fake_temporarily():
        mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16))
    simple_fsdp(model, mesh, [Shard(0)])
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "current"}), (x,)


def tp_delayed() -> Case:
    return _async_tp("delayed")


def async_tp_delayed() -> Case:
    return _async_tp("delayed", _micro_pipeline_tp=True)


def async_tp_bias() -> Case:
    """By Inductor's own setting; two sequences, of which each rank has a part."""
    torch._inductor.config._micro_pipeline_tp = True
    return _async_tp("current", 2, bias=True)
