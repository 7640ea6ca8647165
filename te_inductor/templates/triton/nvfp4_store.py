"""The cast of a weight to NVFP4 as it is stored, in two kernels: its amax, and everything else. Arithmetic of
numerics/nvfp4.py, bit for bit; the order of a block is that of Note [Order of a stored block] there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.numerics import nvfp4
from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton.cached_microscaled_kernels import _e2m1, _two_level, first_scale
from te_inductor.templates.triton.casting import _INFINITY_BITS
from te_inductor.templates.triton.launcher import launcher

_BLOCKS, _WARPS = 64, 4  # blocks of a program
_TURNS = [tl.constexpr(turns[0][0]) for turns in nvfp4._TURNS]
_FIELD, _REST = tl.constexpr(nvfp4._FIELD), tl.constexpr(nvfp4._TURNS[3][0][1])
_SECOND, _SECOND_TURN = tl.constexpr(nvfp4._TURNS[3][1][1]), tl.constexpr(nvfp4._TURNS[3][1][0])
_TURN_0, _TURN_1, _TURN_2, _TURN_3 = _TURNS


def store(
    weight: Tensor,  # (N, K)
    amax: Tensor | None = None,  # () fp32, of all weights that have the tensor's scale; None: of this one
) -> tuple[Tensor, Tensor, Tensor]:  # stored (N, K padded to 16, over 2) uint8, (N, K/16) e4m3, () fp32
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (n, k), wide = weight.shape, triton.cdiv(weight.shape[1], nvfp4.BLOCK)
    programs = triton.cdiv(n * wide, _BLOCKS)
    stored = weight.new_empty((n, wide * nvfp4.BLOCK // 2), dtype=torch.uint8)
    block_scale = weight.new_empty((n, wide), dtype=torch.float8_e4m3fn)
    tensor_scale = weight.new_empty((), dtype=torch.float32)
    given = (weight, n * wide, wide, k, weight.stride(0))
    if amax is None:
        amax = weight.new_zeros((), dtype=torch.float32)
        launcher(_raise_amax, BLOCKS=_BLOCKS, num_warps=_WARPS)(programs, *given, amax)
    run = launcher(_store, BLOCKS=_BLOCKS, num_warps=_WARPS)
    run(programs, *given, amax, stored, block_scale, tensor_scale)
    return stored, block_scale, tensor_scale


@triton.jit
def _values(weight, COUNT, WIDE, K, leading, BLOCKS: tl.constexpr):
    """Blocks of a program, (BLOCKS, 16) fp32 with zeros behind a row's end, and which of them the weight has."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = (block % WIDE * 16)[:, None] + tl.arange(0, 16)[None, :]
    inside = (block < COUNT)[:, None] & (column < K)
    return tl.load(weight + (block // WIDE * leading)[:, None] + column, mask=inside, other=0.0).to(tl.float32), block


@triton.jit
def _raise_amax(
    weight,  # (N, K)
    COUNT,  # blocks
    WIDE,  # of a row
    K,
    leading,
    amax,  # () fp32, zero
    BLOCKS: tl.constexpr,
):
    x, _ = _values(weight, COUNT, WIDE, K, leading, BLOCKS)
    largest = tl.max(tiles.magnitudes(x), 1)
    found = tl.max(tl.where(largest < _INFINITY_BITS, largest, 0), 0)
    tiles.raise_amax(amax.to(tl.pointer_type(tl.int32)), found)


@triton.jit
def _store(
    weight,  # (N, K)
    COUNT,
    WIDE,
    K,
    leading,
    amax,  # () fp32
    stored,  # (COUNT, 8) uint8
    block_scale,  # (COUNT,) e4m3
    tensor_scale,  # () fp32
    BLOCKS: tl.constexpr,
):
    x, block = _values(weight, COUNT, WIDE, K, leading, BLOCKS)
    of_tensor = tl.load(amax)
    if tl.program_id(0) == 0:
        tl.store(tensor_scale, (1.0 / first_scale(of_tensor).to(tl.float64)).to(tl.float32))
    bits = tl.max(tiles.magnitudes(x), 1)
    factor, scale = _two_level(bits.to(tl.float32, bitcast=True), of_tensor)
    scale = tl.where(bits < _INFINITY_BITS, scale.to(tl.float32), float("nan")).to(tl.float8e4nv)
    code = _e2m1(x * factor[:, None]).to(tl.uint32)
    place = tl.arange(0, 16)[None, :]
    i, half = place // 4, place % 2
    field = (((code & 8) << 12) | ((code & 7) << 6)) << (16 * half).to(tl.uint32)
    turn = tl.where(i < 2, tl.where(i == 0, _TURN_0, _TURN_1), tl.where(i == 2, _TURN_2, _TURN_3)).to(tl.uint32)
    first = field & tl.where(i == 3, _REST, _FIELD).to(tl.uint32)
    second = field & tl.where(i == 3, _SECOND, 0).to(tl.uint32)
    turned = ((first >> turn) | (first << ((32 - turn) & 31))) | (
        (second >> _SECOND_TURN) | (second << (32 - _SECOND_TURN))
    )
    # Values of a unit have bits of their own, so that their sum is their union.
    units = tl.sum(tl.sum(tl.reshape(turned.to(tl.int32, bitcast=True), (BLOCKS, 4, 2, 2)), 3), 1)
    unit = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(stored.to(tl.pointer_type(tl.int32)) + unit, units, mask=(block < COUNT)[:, None])
    tl.store(block_scale + block, scale, mask=block < COUNT)
