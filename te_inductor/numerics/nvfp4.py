"""NVFP4 weights on real tensors, in plain torch: the cast, the order in which they are stored, and back.

# Note [Order of a stored block]
A block of 16 values, of one row and along K, is 8 bytes, two little-endian 32-bit units. In NVFP4's own order value k
is nibble k, the low one of a byte first. Stored, the same 64 bits are put where tensor-core operands need them with the
fewest instructions (templates/triton/nvfp4_decode.py has 15 integer instructions for 8 values of the first order, 9 of
this one):

- Unit u holds values ``4 i + 2 u + h`` for i = 0..3 and h = 0, 1: an operand register of the i-th product takes two
  neighbouring values, h = 0 in its low half.
- The E2M1 bits (sign, two of exponent, one of mantissa) of value (i, h) are found in half h of the unit rotated left by
  ``_TURNS[i]``, at bits 15 and 8 to 6: where bf16 has its sign, its low exponent bits and its first mantissa bit. What
  is masked out there is the value times 2**-126, subnormals included. One bit of i = 3 needs a turn of its own.

So a block is 8 bytes in either order, whatever the shape; a saved state_dict holds NVFP4's own.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.numerics import arithmetic, microscaling
from te_inductor.numerics.algebra import TORCH
from te_inductor.recipes.formats import E2M1, E4M3, NV_1X16
from te_inductor.recipes.quantizers import Quantizer

BLOCK = NV_1X16.block[1]
QUANTIZER = Quantizer(E2M1.name, scope=NV_1X16.name)

# What is kept of each half: bf16's sign, two low bits of exponent, one of mantissa.
_FIELD = 0x81C081C0
# (rotation, bits) whose union is value i's field.
_TURNS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, _FIELD),),
    ((6, _FIELD),),
    ((12, _FIELD),),
    ((10, 0x81808180), (2, 0x00400040)),
)
_WORD = 0xFFFFFFFF


def amax_of(weight: Tensor) -> Tensor:  # (N, K) -> () fp32
    """The amax that a weight's scale of the tensor is made of."""
    _, amaxes = _blocks(weight)
    return torch.where(amaxes.isfinite(), amaxes, 0.0).amax()


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of 16 values, (N, K/16, 16), with zeros behind the last of a row, and the amax of each."""
    missing = -weight.shape[1] % BLOCK
    x = (F.pad(weight, (0, missing)) if missing else weight).float()
    blocks = x.view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    return blocks, blocks.abs().amax(-1)


def quantize(
    weight: Tensor,  # (N, K)
    amax: Tensor | None = None,  # () fp32, of all weights that have the tensor's scale; None: of this one
) -> tuple[
    Tensor, Tensor, Tensor
]:  # codes (N, K padded to 16) uint8, block scales (N, K/16) e4m3, tensor scale () fp32
    """Codes are E2M1's four bits. docs/numerics.md states the arithmetic, as for NVFP4's inputs in training, but for
    what is not finite: it makes its block's scale NaN, and counts for no other's."""
    blocks, amaxes = _blocks(weight)
    if amax is None:
        amax = torch.where(amaxes.isfinite(), amaxes, 0.0).amax()
    codes, block_scale = _cast(blocks, amaxes, amax)
    return codes.flatten(1), block_scale, tensor_scale(amax)


def _cast(blocks: Tensor, amaxes: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and the scales of blocks (…, 16) with these amaxes, (…), of tensors with such, which broadcast."""
    factor, block_scale = arithmetic.encode(TORCH, amaxes, QUANTIZER, amax)
    # E2M1 has no NaN.
    block_scale = torch.where(amaxes.isfinite(), block_scale.float(), torch.nan).to(block_scale.dtype)
    return microscaling.cast_e2m1(blocks * factor[..., None]), block_scale


def tensor_scale(amax: Tensor) -> Tensor:
    """What values and block scales are multiplied with, of tensors with these amaxes, fp32."""
    return 1.0 / arithmetic.first_encode_scale(TORCH, amax, QUANTIZER)


def stored(
    weight: Tensor,  # (N, K)
    amax: Tensor | None,  # () fp32, of all weights that have the tensor's scale; None: of this one
) -> tuple[Tensor, Tensor, Tensor]:  # stored (N, K padded to 16, over 2), block scales (N, K/16), tensor scale ()
    """What `quantize_` stores of a weight."""
    codes, block_scale, scale = quantize(weight, amax)
    return repack(microscaling.pack(codes)), block_scale, scale


def store_together(
    weights: Sequence[Tensor],  # (N, K), each K a multiple of 16
    amaxes: Tensor,  # (W,) fp32, of the tensors whose scales they have
) -> tuple[list[Tensor], list[Tensor]]:  # stored (N, K/2) and block scales (N, K/16) of each
    """What `quantize` and `store` make of finite weights, by as many operations for all as for one: blocks know nothing of
    the row that they are in."""
    counts = [weight.numel() // BLOCK for weight in weights]
    blocks = torch.cat([weight.reshape(-1, BLOCK) for weight in weights]).float()
    of_blocks = torch.repeat_interleave(
        amaxes, torch.tensor(counts, dtype=torch.int64, device=amaxes.device), output_size=len(blocks)
    )
    codes, block_scale = _cast(blocks, blocks.abs().amax(-1), of_blocks)
    parts = (store(codes).split(counts), block_scale.split(counts))
    stored, scales = ([part.view(w.shape[0], -1) for part, w in zip(some, weights, strict=True)] for some in parts)
    return stored, scales


def unpack(packed: Tensor) -> Tensor:  # (N, K/2) -> (N, K)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def store(codes: Tensor) -> Tensor:  # (N, K) -> (N, K/2)
    """Note [Order of a stored block]"""
    rows = codes.shape[0]
    fields = codes.long().view(rows, -1, 4, 2, 2)  # block, i, unit, half
    fields = ((fields & 8) << 12) | ((fields & 7) << 6)
    fields = fields[..., 0] | (fields[..., 1] << 16)
    units = torch.zeros_like(fields[:, :, 0])
    for i, turns in enumerate(_TURNS):
        for turn, mask in turns:
            units |= _rotated(fields[:, :, i] & mask, 32 - turn)
    # int32's bits: torch has few kernels for uint32.
    return (units - ((units >> 31) << 32)).to(torch.int32).view(torch.uint8).view(rows, -1)


def repack(packed: Tensor) -> Tensor:  # (N, K/2), K a multiple of 16 -> (N, K/2)
    """`store` of values in NVFP4's own order, by tables: a byte of that order, h = 0 and 1 of one i and u, has bits of
    its own in the unit."""
    bytes_of = packed.view(packed.shape[0], -1, 4, 2).int()  # block, i, unit
    traced = torch._C._len_torch_dispatch_stack() > 0  # then tables are fake, or a trace's, and no other call's
    tables = _tables().to(packed.device) if traced else _kept_tables(packed.device)
    units = torch.zeros_like(bytes_of[:, :, 0])
    for i in range(4):
        units |= tables[i].index_select(0, bytes_of[:, :, i].flatten()).view(units.shape)
    return units.view(torch.uint8).view(packed.shape)


@functools.cache
def _kept_tables(device: torch.device) -> Tensor:
    return _tables().to(device)


def _tables() -> Tensor:  # (4, 256) int32: the unit of each byte at each i
    every = torch.arange(256, dtype=torch.uint8, device="cpu")
    alone = torch.zeros(4, 256, BLOCK // 2, dtype=torch.uint8, device="cpu")
    for i in range(4):
        alone[i, :, 2 * i] = every
    return store(unpack(alone.flatten(0, 1))).view(torch.int32)[:, 0].view(4, 256)


def codes(stored: Tensor) -> Tensor:  # (N, K/2) -> (N, K)
    """What `store` stored."""
    rows = stored.shape[0]
    units = stored.contiguous().view(torch.int32).long().view(rows, -1, 2) & _WORD
    fields = torch.stack([_field(units, turns) for turns in _TURNS], 2)  # block, i, unit
    halves = torch.stack([fields & 0xFFFF, fields >> 16], -1)
    return ((halves >> 12) | (halves >> 6) & 7).to(torch.uint8).view(rows, -1)


def _field(units: Tensor, turns: tuple[tuple[int, int], ...]) -> Tensor:
    field = torch.zeros_like(units)
    for turn, mask in turns:
        field |= _rotated(units, turn) & mask
    return field


def _rotated(units: Tensor, left: int) -> Tensor:
    return ((units << left) | (units >> (32 - left))) & _WORD


def values(stored: Tensor, block_scale: Tensor) -> Tensor:  # (N, K/2), (N, K/16) -> (N, K) fp32
    """The values without the tensor's scale: exact, in bf16 as well."""
    signed = arithmetic.e2m1_value(TORCH, codes(stored))
    rows = stored.shape[0]
    return (signed.view(rows, -1, BLOCK) * block_scale.float()[..., None]).view(rows, -1)


def dequantize(
    stored: Tensor, block_scale: Tensor, tensor_scale: Tensor, k: int | torch.SymInt, dtype: torch.dtype
) -> Tensor:
    """(N, k) of `dtype`, rounded twice: to fp32, then to `dtype`."""
    return (values(stored, block_scale) * tensor_scale)[:, :k].to(dtype)


def recast(stored: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 (N, K) with one scale a row, (N, 1): values times a power of two, the largest that no value of the row's
    largest block scale can saturate. Values 0.5, 1, 2 and 4 stay exact but for underflow; 1.5, 3 and 6 round."""
    exact = values(stored, block_scale)
    largest = E2M1.max * block_scale.float().amax(1, keepdim=True)
    _, exponent = torch.frexp(torch.where(largest > 0, E4M3.max / largest, 1.0))
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    data = (exact * scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    return data, tensor_scale / scale


def linear_fp8(
    x: Tensor,  # (M, K) e4m3
    x_scale: Tensor,  # (M, 1) fp32
    stored: Tensor,  # (N, K/2)
    block_scale: Tensor,  # (N, K/16)
    tensor_scale: Tensor,  # ()
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N)
    """Both in E4M3, the weight as `recast`; the sum in fp32."""
    data, scale_inv = recast(stored, block_scale, tensor_scale)
    with torch.autocast(x.device.type, enabled=False):
        y = x.float() @ data.float().t()
    return (y * x_scale * scale_inv.t()).to(out_dtype)


def linear(
    x: Tensor,  # (M, K)
    stored: Tensor,  # (N, K/2)
    block_scale: Tensor,  # (N, K/16)
    tensor_scale: Tensor,  # ()
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N)
    """``(x @ values.T) * tensor_scale``, the sum in fp32."""
    with torch.autocast(x.device.type, enabled=False):
        y = x.float() @ values(stored, block_scale)[:, : x.shape[1]].t()
    return (y * tensor_scale).to(out_dtype)
