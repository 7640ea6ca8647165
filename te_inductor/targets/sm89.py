"""Ada (8.9): FP8 by cuBLASLt. Also what is assumed of any later GPU that no file here knows."""

from te_inductor.targets.target import Target, named

FIRST = (8, 9)  # with FP8 tensor cores


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    # Triton compiles the portable kernels for whatever comes behind Hopper.
    later = capability >= (9, 0)
    return Target(named(capability), capability, cuda, fp8=True, nvfp4_kernels=later, decode_attention=later)
