"""Generated CUDA code: what of it spills, launches and executes."""

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
