"""Contents, sizes and layouts of tensors that are cast, and casts against the oracle."""

import math

import torch
from torch import Tensor

from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import SCOPES
from tests.bounds import assert_same_values
from tests.oracle import casts

# The scopes of fp32 scales; MXFP8 and NVFP4: test_microscaling.py.
FP32_SCOPES = [name for name, scope in SCOPES.items() if not scope.microscaled]


QUANTIZERS = [
    Quantizer(element, amax_epsilon=epsilon, power_2_scale=power, scope=scope)
    for scope in FP32_SCOPES
    for element in ("e4m3", "e5m2")
    for epsilon in (0.0, 0.5)
    for power in (False, True)
]


SIZES = [(1, 1), (3, 17), (33, 70), (128, 64), (130, 257)]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_values(*values: float):
    def make(rows: int, columns: int) -> Tensor:
        x = torch.randn(rows, columns)
        flat = x.view(-1)
        for index, value in enumerate(values):
            flat[(index * 7) % flat.numel()] = value
        return x

    return make


def rows_apart(rows: int, columns: int) -> Tensor:
    """Rows and columns of very different magnitude, some of zeros, some not finite."""
    x = torch.randn(rows, columns)
    for each in (x, x.t()):
        each.mul_(torch.exp2(torch.randint(-20, 10, (len(each), 1))))
        for index, value in enumerate((0.0, math.nan, math.inf)):
            each[index + 3 : index + 4, index : index + 1] = value
        each[6:7] = 0.0
    return x


CONTENTS = {
    "random": torch.randn,
    "wide": lambda *size: torch.randn(size) * torch.exp2(torch.randint(-30, 15, size)),
    "nan": with_values(math.nan),
    "infinite": with_values(math.inf, -math.inf),
    "nan and infinite": with_values(math.nan, math.inf, -math.inf),
    "zeros": lambda *size: torch.zeros(size),
    "rows apart": rows_apart,
    "one zero": with_values(0.0, -0.0),
    "subnormal": lambda *size: torch.randn(size) * 1e-40,
    "one subnormal": with_values(1e-40),
    "huge": lambda *size: torch.randn(size).clamp(-1, 1) * 3e38,
}


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(*x.shape),
    "strided": lambda x: x[:, ::2],
}


def check(x: Tensor, quantizer: Quantizer, results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (data, scale_inv), (values, value) = results, expected
    wrong = scale_inv.double() != value
    assert data.dtype == quantizer.format.dtype and data.is_contiguous()
    assert scale_inv.dtype == torch.float32 and scale_inv.is_contiguous()
    rows, across = x.shape[0], -(-x.shape[1] // 128)
    shapes = {"tensor": (), "row": (rows, 1), "1x128": (across * rows,), "128x128": (-(-rows // 128) * across,)}
    assert scale_inv.shape == value.shape == shapes[quantizer.scope]
    assert not wrong.any(), f"scale_inv {scale_inv[wrong].tolist()}, oracle {value[wrong].tolist()}"
    assert_same_values(data, values)
    padding, alignment = data[:, x.shape[1] :].view(torch.uint8), 128 if "x" in quantizer.scope else 16
    assert padding.shape[1] < alignment and data.shape[1] % alignment == 0 and not padding.any()


def check_both(x: Tensor, quantizer: Quantizer, quantize, quantize_rowcol) -> None:
    check(x, quantizer, quantize(x, quantizer), casts.quantize(x, quantizer))
    data, scale_inv, data_t, scale_inv_t = quantize_rowcol(x, quantizer)
    values, value, values_t, value_t = casts.quantize_rowcol(x, quantizer)
    check(x, quantizer, (data, scale_inv), (values, value))
    check(x.t(), quantizer, (data_t, scale_inv_t), (values_t, value_t))


PAIRS = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]
