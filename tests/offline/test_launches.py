"""Launches of the largest sizes there are, without a GPU: their grids, and places in memory behind 2**31 elements."""

import ast
from pathlib import Path

import pytest
import torch

from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.kernels.nvfp4_fp8 import NVFP4PromptConfig
from te_inductor.kernels.nvfp4_linear import NVFP4Config, supports
from te_inductor.recipes import DelayedScaling, Gemm, Quantizer
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.recipes.formats import E5M2
from te_inductor.recipes.losses import Loss
from te_inductor.runtime.weights.cached_weights import FreshnessCheck, Spec, new
from tests.offline.harness import INTERPRETER
from tests.support.kernels import stored as problem_of

triton = pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from te_inductor.errors import LaunchError  # noqa: E402
from te_inductor.templates.triton import (  # noqa: E402
    cached_weights,
    decode_attention,
    experts_decode,
    experts_rows,
    fixed_order,
    fp8_small_m,
    group_strips,
    grouped_casts,
    grouped_mm,
    launcher,
    nvfp4_expand,
    nvfp4_fp8,
    nvfp4_linear,
    nvfp4_store,
    partial_sums,
    scale_updates,
    token_losses,
)

MOST = 2**31 - 1  # programs of a grid, along its only axis
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
ROW, TENSOR = Quantizer("e4m3", scope="row"), Quantizer("e4m3")
# Experts, rows and columns of a weight.
SIZES = {
    "DeepSeek-V3, gate and up": (256, 4096, 7168),
    "DeepSeek-V3, down": (256, 7168, 2048),
    "Qwen3-235B, gate and up": (128, 3072, 4096),
    "Qwen3-235B, down": (128, 4096, 1536),
    "gpt-oss-120b, gate and up": (128, 5760, 2880),
    "gpt-oss-120b, down": (128, 2880, 2880),
    "2**31 elements, many experts": (2**17, 128, 128),
    "2**31 elements, long": (2, 2**22, 256),
    "2**31 elements, wide": (2, 256, 2**22),
}


def empty(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def nvfp4(*shape):
    *rows, k = shape
    k = -(-k // 16) * 16
    return empty(*rows, k // 2, dtype=torch.uint8), empty(*rows, k // 16, dtype=FP8)


def nvfp4_products(m, e, n, k):
    rows, parts, problem = e * n, nvfp4(e * n, k), problem_of(m, e * n, k, BF16)
    for config in (
        NVFP4Config("plain", 16, 64, 64, splits=1, warps=4, shares=1, stages=3),
        NVFP4Config("direct", 8, 16, 256, splits=1, warps=1, shares=1, stages=2),
        NVFP4Config("streamed", 16, 128, 256, splits=1, warps=8, shares=1, stages=4),
    ):
        if supports(config, problem) is None:
            x = nvfp4_linear.arranged(empty(m, k, dtype=BF16), config)
            nvfp4_linear.partial_sums(x, *parts, empty(), config, BF16)
    if k % 256 == 0:
        config = NVFP4PromptConfig(128, 1)
        nvfp4_fp8.partial_sums(empty(m, k, dtype=FP8), empty(m, 1), *parts, empty(), config, BF16)
    partial_sums.add_up(empty(2, m, rows), BF16)


def stored_experts(m, e, n, k):
    x, ends, ids = empty(m, k, dtype=BF16), empty(e, dtype=torch.int32), empty(m, dtype=torch.int64)
    for chosen in ((ends, None), (None, ids)):
        experts_decode.nvfp4_product(x, *chosen, *nvfp4(e, n, k), empty(e), BF16)
        experts_decode.fp8_product(x, *chosen, empty(e, n, k, dtype=FP8), empty(e), TENSOR, BF16)


def casts_of_experts(m, e, n, k):
    w = empty(e, n, k, dtype=BF16)
    grouped_casts.transpose_experts(w, empty(e), TENSOR)
    grouped_casts.transpose_experts_by_row(w, ROW)
    grouped_casts.quantize_experts_squares(w, Quantizer("e4m3", scope="128x128"), True)
    if experts_rows.supports(w):
        experts_rows.quantize_experts_rows(w, ROW)


def casts_of_groups(m, e, n, k):
    x, source, starts = empty(e * n, k, dtype=BF16), empty(e * n, dtype=torch.int32), empty(e + 1, dtype=torch.int32)
    for quantizer in (ROW, Quantizer("e4m3", scope="1x128")):
        grouped_casts.quantize_groups(x, source, empty(e * n // 128, dtype=torch.int32), starts, quantizer)
    grouped_casts.transpose_groups(empty(e * n, k, dtype=FP8), source)
    group_strips.quantize_groups_by_column(x, source, starts, ROW)


def grouped_products(m, e, n, k):
    a, b = (empty(*shape, dtype=FP8) for shape in ((m, k), (e, n, k)))
    bounds = empty(e + 1, dtype=torch.int32)
    given = a, empty(), b, empty(e), bounds[1:], None, empty(m, n)
    grouped_mm.prepared(*given, Gemm("fprop"), programs=132).launch()
    given = empty(n, m * 128, dtype=FP8), empty(), empty(k, m * 128, dtype=FP8), empty(), bounds, empty(e, n, k)
    grouped_mm.prepared_wgrad(*given, Gemm("wgrad"), False, programs=132).launch()


def kept_weights(m, e, n, k):
    """All experts as one weight."""
    w = torch.nn.Parameter(empty(e * n, k, dtype=BF16))
    for scope in ("tensor", "row", "128x128", "1x32"):
        kept = new(Spec(Quantizer("e4m3", scope=scope), False, 1, None), [w])
        cached_weights.OnDevice().run([FreshnessCheck(kept, [w])])


def few_rows(m, e, n, k):
    config = small_m.cut(m, e * n, k)
    given = empty(m, k, dtype=FP8), empty(), empty(e * n, k, dtype=FP8), empty()
    fp8_small_m.partial_sums(*given, config, BF16)


def fixed_order_products(m, e, n, k):
    fixed_order.fixed_mm(*(empty(1, rows, k, dtype=BF16) for rows in (m, e * n)), None, None, False, BF16)


def expansions(m, e, n, k):
    nvfp4_expand.dequantize(*nvfp4(e, n, k), empty(e), k, BF16)
    nvfp4_expand.recast(*nvfp4(e * n, k), empty())
    nvfp4_store.store(empty(e * n, k, dtype=BF16))


def attention(m, e, n, k):
    """Attends with as many batches times heads as experts times m, and a cache of n keys."""
    keys = empty(e, m, n, 128, dtype=BF16)
    decode_attention.attention(empty(e, 8 * m, 1, 128, dtype=BF16), keys, keys, None, 1.0)


def updates(m, e, n, k):
    update = ScaleUpdate(DelayedScaling(), "e4m3")
    addresses = empty(2 * e, dtype=torch.int64)
    scale_updates.launch_read(empty(2), addresses)
    scale_updates.launch(empty(2), addresses, update)


def losses(m, e, n, k):
    """The losses of k tokens, with as many words as all experts have rows."""
    kernels, loss, words = token_losses.SoftmaxKernels(), Loss(-100), min(e * n, 2**22)
    logits, labels = empty(k, words, dtype=BF16), empty(k, dtype=torch.int64)
    sums = empty(k)
    kernels.losses(logits, labels, loss, empty(k), sums)
    kernels.copies(logits, labels, loss, sums, E5M2, True, empty(words, k, dtype=torch.float8_e5m2))


LAUNCHES = [
    nvfp4_products, stored_experts, casts_of_experts, casts_of_groups, grouped_products, kept_weights, few_rows,
    fixed_order_products, expansions, attention, updates, losses,
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Grids by kernel; nothing runs."""
    grids = {}

    def noted(kernel, grid):
        return lambda *_, **__: grids.setdefault(kernel.__name__, []).append(grid)

    monkeypatch.setattr(JITFunction, "__getitem__", noted)
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda self: None)
    return grids


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_grids(sizes, launched):
    """CUDA's grids hold 65,535 programs along their second and third axis, and 2**31 - 1 along the first."""
    for launch in LAUNCHES:
        launch(64, *sizes)
    assert len(launched) > 15
    wrong = {name: grids for name, grids in launched.items() if any(len(g) > 1 or not 0 < g[0] <= MOST for g in grids)}
    assert not wrong


def test_every_kernel_is_launched_so(launched):
    """Each kernel finds what it computes along the first axis alone."""
    for launch in LAUNCHES:
        launch(64, 128, 2048, 2048)
    kernels, asked = set(), {}
    for path in set(Path(launcher.__file__).parent.glob("*.py")) - {Path(launcher.__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".program_id", ".num_programs")):
                asked.setdefault(ast.unparse(node.args[0]), []).append(path.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("launcher", "Launcher"):
                kernels.add(ast.unparse(node.args[0]))
    assert set(asked) == {"0"}, asked
    assert kernels - {"collect_amaxes"} == set(launched)


def test_too_many(launched):
    expected = r"kernel _expand .* \(2, 17179869184, 4\), .* 4,294,967,296 programs, expected at most 2,147,483,647"
    with pytest.raises(LaunchError, match=expected):
        nvfp4_expand.dequantize(*nvfp4(2, 2**34, 16), empty(2), 16, BF16)
    assert not launched


@pytest.mark.thorough
def test_places():
    """The last programs of operands with more than 2**31 elements."""
    done = INTERPRETER.run("tests.offline.large_kernels")
    assert done.returncode == 0, done.stderr[-3000:]
