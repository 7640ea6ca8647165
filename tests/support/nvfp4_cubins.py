"""Kernels of NVFP4 as cubins."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


TOUCHES = r"(ld|st)\.global|cp\.async|atom|red\."  # memory, in PTX


def disassembled(cubin: bytes, folder) -> list[str]:
    """Instructions without their predicates."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    code = subprocess.run([NVDISASM, path], capture_output=True, text=True, check=True).stdout
    return [
        line.strip() for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([^;]+);", code, re.MULTILINE)
    ]


def compiled(function, constants, types, options):
    """Compiles for sm_90, pointers and N aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in places}
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in (*pointers, "N") if signature[name] != "constexpr"}
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(
        fn=function, signature=signature, constexprs={places[k]: v for k, v in constants.items()}, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
