"""Blackwell's workstation GPUs (12.0). Kernels are built and disassembled; never run."""

from te_inductor.targets.target import Ability, Target, named

CAPABILITIES = ((12, 0),)  # sm_120a code runs on no 12.1


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    can = Ability.FP8 | Ability.NVFP4_KERNELS | Ability.DECODE_ATTENTION
    return Target(named(capability), capability, cuda, can=can, cutlass="120")
