"""Hopper (9.0): H100, H200."""

from dataclasses import replace

from te_inductor.targets.target import Ability, Limits, Rates, Target, named, version

CAPABILITIES = ((9, 0),)
LIMITS = Limits(132, 227 * 2**10, 50 * 2**20)  # of an H100 (SXM) and an H200, with which all constants were measured
# torch 2.11.0+cu130, triton 3.6.0; docs/ledger/models.md has the measurements:
# GEMMs in bf16 alone took 651 to 665 TF/s, in FP8 without CUTLASS in whole steps of nine models about 1150, of blocks
# 0.87 of that; casts of weights moved 3.0 to 3.8 TB/s; the host took 33 us a launch, which is 40 of those
# that are counted.
H200 = Rates(
    product="NVIDIA H200",
    source="measured on an H200",
    bf16_flops=650e12,
    fp8_flops=1150e12,
    block_flops=1000e12,
    bytes=3.2e12,
    launch=2.2e-6,
    host_launch=40e-6,
)
# These are not measured: an H100 has the same tensor cores, and 3.35 TB/s of memory where an H200 has 4.8 (NVIDIA's
# data sheets). What else is Hopper has at least as much memory for its FLOPs, or is slower in both.
OTHER = replace(
    H200,
    product="",
    source="measured on an H200, but for memory as fast as an H100's data sheet says",
    bytes=H200.bytes * 3.35 / 4.8,
)
BLOCK_SCALES = (12, 9)  # the first CUDA whose cuBLASLt takes them


OWN = Ability.NVFP4_KERNELS | Ability.GROUPED_KERNELS | Ability.HOPPER_KERNELS | Ability.DECODE_ATTENTION


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    blocks = Ability.BLOCK_SCALES if version(cuda) >= BLOCK_SCALES else Ability.NONE
    return Target(
        named(capability),
        capability,
        cuda,
        can=Ability.FP8 | blocks | OWN,
        cutlass="90",
        rates=(H200, OTHER),
    )
