"""Ada (8.9): FP8 by cuBLASLt. Also what is assumed of any later GPU that no file here knows."""

from te_inductor.targets.target import Ability, Target, named

FIRST = (8, 9)  # with FP8 tensor cores


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    # Triton compiles the portable kernels for whatever comes behind Hopper.
    portable = Ability.NVFP4_KERNELS | Ability.DECODE_ATTENTION
    can = Ability.FP8 | (portable if capability >= (9, 0) else Ability.NONE)
    return Target(named(capability), capability, cuda, can=can)
