"""Blackwell's data center GPUs (10.0: B200; 10.3: B300). Generated, interpreted and disassembled; never run."""

import torch

from te_inductor.targets.target import Ability, Target, named, version

CAPABILITIES = ((10, 0), (10, 3))
MICROSCALES = (12, 8)  # the first CUDA whose cuBLASLt takes MXFP8 and NVFP4
GROUPS_BUILT = ("USE_MSLK", "USE_FBGEMM_GENAI")  # in how torch was built: the library of grouped microscaled GEMMs
MICROSCALED = (("e4m3", "1x32"), ("e5m2", "1x32"), ("e2m1", "1x16"))
GROUPS = (("e4m3", "1x32"), ("e2m1", "1x32"), ("e2m1", "1x16"))


def target(capability: tuple[int, int], cuda: str | None) -> Target:
    return Target(
        named(capability),
        capability,
        cuda,
        can=Ability.FP8 | Ability.NVFP4_KERNELS | Ability.DECODE_ATTENTION,
        microscaled_mm=MICROSCALED if version(cuda) >= MICROSCALES else (),
        grouped_microscaled_mm=(
            GROUPS
            if capability == (10, 0)  # its kernels are sm_100a code
            and version(cuda) >= MICROSCALES
            # A torch without CUDA is asked about a device elsewhere, whose torch has it, as the published ones do.
            and (torch.version.cuda is None or any(name in torch.__config__.show() for name in GROUPS_BUILT))
            else ()
        ),
        cutlass="100" if capability == (10, 0) else None,  # sm_100a code runs on no 10.3
    )
