"""Machine code of kernels, and what of it spills, launches and executes."""

import re
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def spilled(made) -> int:
    """Bytes of a thread that registers do not hold."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def machine_code(compiled: Path) -> str:
    """Disassembled, of the GPU's ELF file inside the host's."""
    data = compiled.read_bytes()
    [start] = [
        m.start() for m in re.finditer(b"\x7fELF", data) if struct.unpack_from("<H", data, m.start() + 18) == (190,)
    ]
    [headers] = struct.unpack_from("<Q", data, start + 32)
    size, count = struct.unpack_from("<HH", data, start + 54)
    cubin = compiled.with_suffix(".cubin")
    cubin.write_bytes(data[start : start + headers + size * count])
    return subprocess.run([NVDISASM, cubin], capture_output=True, text=True, check=True).stdout


def launches(source: str) -> list[str]:
    """Names of the kernels that a wrapper runs, in order, as often as it runs them."""
    return re.findall(r"^ *(triton_\w+)\.run\(", source, re.MULTILINE)


TOUCHES = r"(ld|st)\.global|cp\.async|atom|red\."  # memory, in PTX


def disassembled(cubin: bytes, folder) -> list[str]:
    """Instructions without their predicates."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    code = subprocess.run([NVDISASM, path], capture_output=True, text=True, check=True).stdout
    return [
        line.strip() for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([^;]+);", code, re.MULTILINE)
    ]


def compiled(function, constants, types, options, multiples=("N",), capability=90):
    """Compiles with pointers, and `multiples` of 16, aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in places}
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    aligned = {
        places[name]: [["tt.divisibility", 16]]
        for name in (*pointers, *multiples)
        if signature.get(name, "constexpr") != "constexpr"
    }
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(
        fn=function, signature=signature, constexprs={places[k]: v for k, v in constants.items()}, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
