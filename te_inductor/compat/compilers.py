"""The C++ compiler that Inductor calls, for models on a CPU."""

import functools
import re
import subprocess


@functools.cache
def width_of_right_vectors() -> int | None:
    """The bits of a vector (`cpp.simdlen`) with which Inductor's C++ is right, or None where any are.

    GCC 12 tunes for `generic` where it does not recognise the processor. So tuned, its vectorizer of basic blocks
    (`-ftree-slp-vectorize`) compiles Inductor's transpose of 16-bit tiles (`transpose_mxn`) to wrong code where a kernel
    has two of them, with 512 bits alone: most of both results is then garbage."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    try:
        compiler = cpp_builder.get_cpp_compiler()
        isa = cpu_vec_isa.pick_vec_isa()
        if not cpp_builder.is_gcc() or not isa or isa.bit_width() < 512:
            return None
        return 256 if is_gcc_wrong(*(_output(compiler, question) for question in _QUESTIONS)) else None
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no compiler, or one that does not answer: Inductor says so where it needs one


def is_gcc_wrong(version: str, tuning: str) -> bool:
    """Tells by what GCC answers to `-dumpversion` and to `-march=native -Q --help=target`."""
    return version.split(".")[0].strip() == "12" and re.search(r"-mtune=\s+generic\b", tuning) is not None


_QUESTIONS = (("-dumpversion",), ("-march=native", "-Q", "--help=target"))


def _output(compiler: str, question: tuple[str, ...]) -> str:
    return subprocess.run([compiler, *question], capture_output=True, text=True, check=True, timeout=10).stdout
