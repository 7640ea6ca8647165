"""What tensor cores make of their operands, on the CPU: it stands where the library stands when generated code is
interpreted. The layout of scales is the documented one, written down apart from the code that it checks."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from te_inductor.templates import grouped_library
from te_inductor.templates.cutlass import launch
from tests import grouped_library as stand_in

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def scaled_mm(
    a: Tensor,  # (M, K) e4m3 or e5m2, or (M, K/2) float4_e2m1fn_x2
    b: Tensor,  # (K, N), or (K/2, N)
    a_scale: Tensor,  # swizzled e8m0 or e4m3
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    out: Tensor,  # (M, N)
) -> Tensor:
    assert not use_fast_accum
    product = _values(a, a_scale) @ _values(b.t(), b_scale).t()
    return out.copy_(product.to(out_dtype))


def microscaled_mm(
    a: Tensor,  # (M, K) fp8, or (M, K/2) bytes
    b: Tensor,  # (N, K), or (N, K/2)
    a_scale: Tensor,  # swizzled: bytes of e8m0, or e4m3
    b_scale: Tensor,
    *rest: Tensor,  # alpha of NVFP4, a bias
    tile: tuple[int, ...],
    arch: str,
    scope: str,
    out: Tensor,  # (M, N)
) -> Tensor:
    """What CUTLASS's kernel of that tile makes of them: rounded once."""
    packed = scope == "1x16"
    if packed:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    else:
        a_scale, b_scale = a_scale.view(torch.float8_e8m0fnu), b_scale.view(torch.float8_e8m0fnu)
    product = _values(a, a_scale) @ _values(b, b_scale).t()
    alpha, bias = rest[:1] if packed else (), rest[1:] if packed else rest
    product = product * alpha[0].double() if alpha else product
    return out.copy_((product + bias[0].double() if bias else product).to(out.dtype))


def quantized_mm(*operands: Tensor, **given: Any) -> Tensor:
    """What is computed where CUTLASS's kernel could not be built."""
    without = mock.patch.object(launch, "_function", lambda *_: None)
    with without, mock.patch.object(torch, "_scaled_mm", fp8_mm):
        return launch.quantized_mm(*operands, **given)


def scaled_grouped_mm(*operands: Any) -> Tensor:
    """torch's grouped product of microscaled operands, as our op calls it."""
    products = {"_scaled_grouped_mm": stand_in.product, "_scaled_grouped_mm_v2": stand_in.product_of_four_bits}
    with mock.patch.multiple(torch, **products):
        return grouped_library.scaled_grouped_mm(*operands)


_own = torch._scaled_mm


def fp8_mm(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Computes what `torch._scaled_mm` does, whose own kernel for the CPU needs a minute for 2**30 products."""
    if a_scale.shape not in ((), (1,), (a.shape[0], 1)) or b_scale.shape not in ((), (1,), (1, b.shape[1])):
        return _own(a, b, a_scale, b_scale, bias, **given)
    product = (a.float() @ b.float()) * (a_scale * b_scale)
    product = (product if bias is None else product + bias.float()).to(given["out_dtype"])
    return given["out"].copy_(product) if "out" in given else product


def _values(data: Tensor, scale: Tensor) -> Tensor:  # (R, K) float64
    packed = data.dtype == torch.float4_e2m1fn_x2
    values = _unpacked(data.view(torch.uint8)) if packed else data.double()
    block = 16 if packed else 32
    assert scale.dtype == (torch.float8_e4m3fn if packed else torch.float8_e8m0fnu)
    rows, blocks = values.shape[0], -(-values.shape[1] // block)
    down, across = -(-rows // 128) * 128, -(-blocks // 4) * 4
    assert scale.numel() == down * across
    padding = unswizzled(scale.view(torch.uint8), down, across)
    padding[:rows, :blocks] = 0
    assert not padding.any(), "scales behind the last row or block are read from somewhere"
    return values * unswizzled(scale, rows, blocks).repeat_interleave(block, 1)[:, : values.shape[1]]


def _unpacked(codes: Tensor) -> Tensor:
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    return torch.where(both > 7, -1.0, 1.0).double() * _E2M1[(both & 7).long()]


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """cuBLAS documentation, "1D Block Scaling Factors Layout"."""
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = (r // 128) * -(-blocks // 4) + c // 4
    place = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    return scale.double()[place]
