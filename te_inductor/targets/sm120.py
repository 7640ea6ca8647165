"""Blackwell's workstation GPUs (12.0). Kernels are built and disassembled; never run."""

from te_inductor.targets.target import Target, named

CAPABILITIES = ((12, 0),)  # sm_120a code runs on no 12.1


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    return Target(
        named(capability), capability, cuda, fp8=True, cutlass="120", nvfp4_kernels=True, decode_attention=True
    )
