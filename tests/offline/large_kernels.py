"""Runs the last programs of kernels whose operands have more than 2**31 elements, in Triton's interpreter, and compares:

TRITON_INTERPRET=1 python -m tests.offline.large_kernels

Memory is mapped and not filled: of operands only the last rows are written, and read."""

import inspect
import math
import mmap
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import interpreter

from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.kernels.nvfp4_linear import NVFP4Config
from te_inductor.numerics import nvfp4
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import decode_attention as eager
from te_inductor.runtime.eager import grouped
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_weights import FreshnessCheck, Spec
from te_inductor.templates.triton import (
    cached_weights as on_device,
)
from te_inductor.templates.triton import (
    decode_attention,
    experts_decode,
    experts_rows,
    fixed_order,
    fp8_small_m,
    group_strips,
    grouped_casts,
    nvfp4_expand,
    nvfp4_linear,
    partial_sums,
)
from tests.offline.interpret import mend_interpreter

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
ROW, TENSOR = Quantizer("e4m3", scope="row"), Quantizer("e4m3")
LAST = 4  # programs of a launch that run
EXPERTS, N, K = 257, 4096, 2048  # of a weight, each of a size that models have


def mapped(shape: Any, dtype: torch.dtype) -> Tensor:
    """Zeros, which take no memory before they are written."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def new_empty(like: Tensor, shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mapped(shape, dtype or like.dtype)


def last_programs(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in the place of the interpreter's own loop over the grid, on tensors that are on the CPU."""
    patched, named = interpreter._patch_lang(self.fn), inspect.getfullargspec(self.fn).args
    try:
        given = inspect.getcallargs(self.fn, *args, **{name: kwargs[name] for name in named if name in kwargs})
        values = {
            name: value if name in self.constexprs else interpreter._implicit_cvt(value)
            for name, value in given.items()
        }
        [programs] = self.grid
        interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
        for program in range(max(programs - LAST, 0), programs):
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
            self.fn(**values)
    finally:
        patched.restore()


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    assert expected.abs().max() > 0, what
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=2e-2, atol=1e-2 * float(expected.abs().max()), msg=what
    )


def stored(*shape: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """An NVFP4 weight, of which the last 128 rows hold something: those."""
    *rows, k = shape
    codes, block_scale, tensor_scale = nvfp4.quantize(torch.randn(128, k))
    data, scales = mapped((*rows, k // 2), torch.uint8), mapped((*rows, k // 16), FP8)
    filled = nvfp4.store(codes), block_scale, tensor_scale
    data.view(-1, k // 2)[-128:], scales.view(-1, k // 16)[-128:] = filled[:2]
    return data, scales, filled


def expansions() -> None:
    data, scales, filled = stored(EXPERTS, N, K)
    wide = nvfp4_expand.dequantize(data, scales, filled[2].expand(EXPERTS).contiguous(), K, BF16, assembly=False)
    assert torch.equal(wide[-1, -8:], nvfp4.dequantize(*filled, K, BF16)[-8:]), "dequantize"
    found, scale_inv = nvfp4_expand.recast(data.view(-1, K // 2), scales.view(-1, K // 16), filled[2], assembly=False)
    expected = nvfp4.recast(*filled)
    assert torch.equal(found[-8:].float(), expected[0][-8:].float()), "recast"
    assert torch.equal(scale_inv[-8:], expected[1][-8:]), "recast"


def stored_products() -> None:
    data, scales, filled = stored(EXPERTS * N, K)
    config = NVFP4Config("plain", 16, 64, 64, splits=1, warps=4, shares=1, stages=3)
    x, dense = torch.randn(3, K).bfloat16(), nvfp4.dequantize(*filled, K, FP32)
    y = nvfp4_linear.partial_sums(nvfp4_linear.arranged(x, config), data, scales, filled[2], config, FP32, False)
    assert_near(y[0, :, -64:], x.float() @ dense[-64:].t(), "a long weight")
    rows = mapped((2**31 // K + 16, 4, K // 4), BF16)
    rows[-3:] = nvfp4_linear.arranged(x, config)
    y = nvfp4_linear.partial_sums(rows, data[-128:], scales[-128:], filled[2], config, FP32, False)
    assert_near(y[0, -3:, -64:], x.float() @ dense[-64:].t(), "many rows")


def experts() -> None:
    data, scales, filled = stored(EXPERTS, N, K)
    x, ids = torch.randn(2, K).bfloat16(), torch.full((2,), EXPERTS - 1)
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    ends[-1] = 2
    weights = {"nvfp4": nvfp4.dequantize(*filled, K, FP32)[-64:]}
    values = mapped((EXPERTS, N, K), FP8)
    values[-1, -64:] = weights["fp8"] = torch.randn(64, K).to(FP8)
    # A tensor by columns, as attention may leave it: its last column is behind 2**31 elements.
    far = mapped((K, 2**32 // K), BF16).t()[-2:]
    far.copy_(x)
    for given, of in ((x, "rows"), (far, "columns")):
        for chosen in ((ends, None), (None, ids)):
            rest = {"out_dtype": FP32, "assembly": False}
            scale = filled[2].expand(EXPERTS).contiguous()
            y = {
                "nvfp4": experts_decode.nvfp4_product(given, *chosen, data, scales, scale, **rest),
                "fp8": experts_decode.fp8_product(given, *chosen, values, torch.ones(EXPERTS), TENSOR, **rest),
            }
            for name, weight in weights.items():
                assert_near(y[name][:, -64:], x.float() @ weight.float().t(), f"{name} experts, {of}")


def few_rows() -> None:
    b, x = mapped((EXPERTS * N, K), FP8), torch.randn(3, K).to(FP8)
    b[-64:] = torch.randn(64, K).to(FP8)
    y = fp8_small_m.partial_sums(x, torch.ones(()), b, torch.ones(()), small_m.cut(3, EXPERTS * N, K), FP32, False)
    assert_near(y.sum(0)[:, -64:], x.float() @ b[-64:].float().t(), "FP8 and few rows")


def fixed_order_products() -> None:
    b, x = mapped((1, EXPERTS * N, K), FP8), torch.randn(1, 3, K).to(FP8)
    b[0, -128:] = torch.randn(128, K).to(FP8)
    y = fixed_order.fixed_mm(x, b, None, None, False, FP32)
    assert_near(y[0, :, -128:], x[0].float() @ b[0, -128:].float().t(), "sums in one order")


def sums() -> None:
    parts = mapped((2, 3, 2**31 // 3 + 512), FP32)
    parts[:, -1, -512:] = torch.randn(2, 512)
    y = partial_sums.add_up(parts, FP32, assembly=False)
    assert torch.equal(y[-1, -512:], parts[0, -1, -512:] + parts[1, -1, -512:]), "sums of parts"


def casts_of_experts() -> None:
    w = mapped((EXPERTS, N, K), BF16)
    tile = w[-1, -128:, -128:].copy_(torch.randn(128, 128))
    alone = torch.zeros(1, 128, 128).bfloat16()
    alone[0] = tile
    scale = torch.full((EXPERTS,), 3.0)
    found = grouped_casts.transpose_experts(w, scale, TENSOR)
    expected = grouped.quantize_experts_delayed(alone, scale[:1], TENSOR, True)
    assert torch.equal(found[-1, -64:, -128:].float(), expected[0, -64:, :128].float()), "transposes"
    squares = Quantizer("e4m3", scope="128x128")
    for transposed in (False, True):
        found, scale_inv = grouped_casts.quantize_experts_squares(w, squares, transposed)
        expected = grouped.quantize_experts(alone, squares, None, transposed)
        assert torch.equal(found[-1, -128:, -128:].float(), expected[0][0, :, :128].float()), "squares"
        assert torch.equal(scale_inv[-1, -1], expected[1][0, 0]), "squares"
    columns, _ = grouped_casts.column_scales(w, None, None, EXPERTS, ROW)
    _, of_columns = grouped.quantize_experts(alone, ROW, None, True)
    assert torch.equal(1 / columns[-1, -64:], of_columns[0, -64:]), "scales of columns"
    rows = experts_rows.quantize_experts_rows(w, ROW)
    expected = grouped.quantize_experts_rows(alone, ROW)
    assert torch.equal(rows[0][-1, -32:, -128:].float(), expected[0][0, -32:, :128].float()), "rows"
    assert torch.equal(rows[1][-1, -32:], expected[1][0, -32:]), "rows"


def casts_of_groups() -> None:
    high = 2 * EXPERTS * N  # bytes of a transpose are stored in pairs
    x = mapped((high, K), BF16)
    x[-128:, -64:] = torch.randn(128, 64)
    source = torch.arange(high, dtype=torch.int32)
    starts = torch.tensor([0, high - 128, high], dtype=torch.int32)
    groups = torch.zeros(high // 128, dtype=torch.int32)
    groups[-1] = 1
    own = torch.arange(128, dtype=torch.int32)
    alone = x[-128:, -64:], own, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
    expected = grouped.quantize_groups(*alone, ROW)
    for name, found in (
        ("strips", group_strips.quantize_groups_by_column(x, source, starts, ROW)),
        ("columns", grouped_casts.quantize_groups(x, source, groups, starts, ROW)),
    ):
        assert torch.equal(found[0][-64:, -128:].float(), expected[0].float()), name
        assert torch.equal(found[1][-1, -64:], expected[1][0]), name
    scope = Quantizer("e4m3", scope="1x128")
    found, expected = (
        grouped_casts.quantize_groups(x, source, groups, starts, scope),
        grouped.quantize_groups(*alone, scope),
    )
    assert torch.equal(found[0][-64:, -128:].float(), expected[0].float()), "blocks"
    assert torch.equal(found[1][-64:], expected[1]), "blocks"
    data = mapped((high, K), FP8)
    data[-128:, -128:] = torch.randn(128, 128).to(FP8)
    found = grouped_casts.transpose_groups(data, source)
    assert torch.equal(found[-128:, -128:].float(), data[-128:, -128:].float().t()), "bytes"


def kept_weights() -> None:
    w = mapped((EXPERTS * N, K), BF16)
    w[-128:, -128:] = torch.randn(128, 128)
    for quantizer in (Quantizer("e4m3", scope="128x128"), Quantizer("e4m3", scope="1x32")):
        kept = cached_weights.new(Spec(quantizer, False, 1, None), [w])
        kept.want_columns()
        on_device.OnDevice().run([FreshnessCheck(kept, [w])])
        other = cached_weights.new(Spec(quantizer, False, 1, None), [w[-128:, -128:].contiguous()])
        other.want_columns()
        cached_weights.refresh([FreshnessCheck(other, [w[-128:, -128:].contiguous()])])
        assert torch.equal(kept.data[-128:, -128:].float(), other.data.float()), quantizer
        assert torch.equal(kept.data_t[-128:, -128:].float(), other.data_t.float()), quantizer


def attention() -> None:
    """Attends with 2**17 heads; keys that lie across heads, so that the last column is behind 2**31 elements, too."""
    batch, keys, wide = 2**17 + 1, 256, 128
    q = mapped((batch, 1, 8, wide), BF16)
    k, v = mapped((wide, batch, keys), BF16).permute(1, 2, 0)[:, None], mapped((batch, 1, keys, wide), BF16)
    given = [tensor[-1:].copy_(torch.randn(1, *tensor.shape[1:])) for tensor in (q, k, v)]
    y = decode_attention.attention(q, k, v, None, 0.1, assembly=False)
    assert_near(y[-1, 0, -LAST:], eager.decode_attention(*given, None, 0.1)[0, 0, -LAST:], "attention")


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", last_programs),
        mock.patch.object(Tensor, "new_empty", new_empty),
    ):
        for case in (
            expansions, stored_products, experts, few_rows, fixed_order_products, sums,
            casts_of_experts, casts_of_groups, kept_weights, attention,
        ):  # fmt: skip
            case()
