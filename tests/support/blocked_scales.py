"""Scales of blocks as CUTLASS's kernels read them."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def blocked(m: int, n: int, k: int, scope: str) -> tuple[torch.Tensor, ...]:
    """Operands, and scales of many magnitudes, as `torch._scaled_mm` has them."""
    across = -(-k // 128)
    a, b = (torch.randn(rows, k, device="cuda").mul_(4).to(E4M3) for rows in (m, n))
    down = -(-n // 128) if scope == "128x128" else n
    a_scale, b_scale = (torch.randn(across, rows, device="cuda").mul_(8).exp2() for rows in (m, down))
    return a, b, a_scale.t(), b_scale.t().contiguous().t() if scope == "128x128" else b_scale


def spread(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Spreads scales of (R, K/128) or (R/128, K/128) blocks, one an element of (R, K)."""
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(128, 0)[:rows]
    return scale.double().repeat_interleave(128, 1)[:, :k]
