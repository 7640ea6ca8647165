"""Hopper (9.0): H100, H200."""

from te_inductor.targets.target import Rates, Target, named, version

CAPABILITIES = ((9, 0),)
# H200, torch 2.11.0+cu130, 2026-11-20: "Where padding and small sizes stop to pay" in docs/performance.md.
RATES = Rates(bf16_flops=650e12, fp8_flops=1250e12, bytes=2.6e12, launch=2.2e-6)
BLOCK_SCALES = (12, 9)  # the first CUDA whose cuBLASLt takes them


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    return Target(
        named(capability),
        capability,
        cuda,
        fp8=True,
        block_scaled_mm=version(cuda) >= BLOCK_SCALES,
        cutlass="90",
        nvfp4_kernels=True,
        grouped_mm=True,
        hopper_kernels=True,
        decode_attention=True,
        rates=RATES,
    )
