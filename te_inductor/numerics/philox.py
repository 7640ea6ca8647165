"""Random bits that are a pure function of a seed and an index: Philox4x32-10, in plain torch.

Inductor's kernels have the same generator (`ops.randint64`: Triton's `tl.randint4x`, ATen's `philox_engine` on CPU), so
that eager and compiled rounding agree bit for bit. The seed comes from torch's generator, as a tensor.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import torch
from torch import Tensor

BITS = 24  # of each word that are used: what an fp32 number can hold
SEEDS = 2**32  # the key's low word; Inductor's CPU code takes no more
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def new_seed(device: torch.device) -> Tensor:
    """() int64, another one at each call; `torch.manual_seed` decides which."""
    return torch.randint(0, SEEDS, (), dtype=torch.int64, device=device)


def random_bits(
    seed: Tensor,  # () int64
    count: int,
) -> Tensor:  # (count,) int64, each of BITS bits
    """The first word of the counters 0 to count - 1."""
    counter = torch.arange(count, dtype=torch.int64, device=seed.device) & _WORD
    zero = torch.zeros_like(counter)
    return philox((counter, zero, zero, zero), (seed & _WORD, torch.zeros_like(seed)))[0] & (2**BITS - 1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],  # int64 tensors of 32-bit words
    key: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two words wraps around in int64, which loses nothing: its bits are those of the 64-bit product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
