"""Run generated CUDA code on the CPU: the wrapper as it is, its Triton kernels in Triton's interpreter.

A program of its own, because the interpreter must be chosen before triton is imported::

    TRITON_INTERPRET=1 python -m tests.offline.interpret GRAPH.py INPUTS.pt OUTPUTS.pt

INPUTS is a list of runs, each a list of CPU tensors, one for each argument of the graph; OUTPUTS lists what each
returned."""

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

import te_inductor.ops  # noqa: F401  which generated code calls
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.constants import source_name
from tests.offline.harness import Kernel, _kernel

POISON = 0xFF  # NaN in every float format used here
# A program of the interpreter costs milliseconds: few, at most so many of a kernel without reductions.
PROGRAMS = 64
POINTWISE, TILED = {"XBLOCK": 1024}, {"XBLOCK": 32, "YBLOCK": 32}
REDUCTION = {"XBLOCK": 16, "YBLOCK": 16, "R0_BLOCK": 64}

# What of the wrapper needs a device, and what stands there instead.
ON_CPU = {
    r"^empty_strided_cuda = .*$": "from tests.offline.interpret import empty_poisoned as empty_strided_cuda",
    r"^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream$": "get_raw_stream = lambda device: 0",
    r"with torch\.cuda\._DeviceGuard\(0\):": "if True:",
    r"torch\.cuda\.set_device\(0\)": "pass",
    r"async_compile = AsyncCompile\(\)": "from tests.offline.interpret import compiler as async_compile",
    # With scales of blocks, swizzled; torch's own for the CPU knows others alone.
    r"extern_kernels\._scaled_mm\((?=.*(float8_e8m0fnu|float4_e2m1fn_x2))": "tensor_cores.scaled_mm(",
    r"extern_kernels\._scaled_mm\(": "tensor_cores.fp8_mm(",
    r"extern_kernels\.te_inductor_cutlass_microscaled_mm\(": "tensor_cores.microscaled_mm(",
    r"extern_kernels\.te_inductor_cutlass_quantized_mm\(": "tensor_cores.quantized_mm(",
    r"torch\.ops\.te_inductor\.scaled_grouped_mm\.default\(": "tensor_cores.scaled_grouped_mm(",
    r"^from torch\._inductor\.select_algorithm import extern_kernels$": "\\g<0>\nfrom tests.offline import tensor_cores",
}

# A cast, of which the interpreter runs Triton's own, and pairs of bytes.
IN_PTX = r"tl\.inline_asm_elementwise\('[^']*cvt\.rn\.satfinite[^']*', '[^']*', \[(\w+)\], dtype=(tl\.\w+), .*?pack=4\)"
PAIRS_IN_PTX = r"tl\.inline_asm_elementwise\('prmt[^']*', '[^']*', \[(\w+), (\w+)\], dtype=tl\.uint16, .*?pack=4\)"
PAIRS = " | ".join(
    rf"({byte}.to(tl.uint8, bitcast=True).to(tl.uint16) << {bits})" for byte, bits in ((r"\1", 0), (r"\2", 8))
)


def empty_poisoned(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    made.untyped_storage().copy_(
        torch.full((made.untyped_storage().nbytes(),), POISON, dtype=torch.uint8).untyped_storage()
    )
    return made


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class Interpreted:
    """Stands where Inductor's launcher stands: `.run(*arguments, stream=…)`."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        path = folder / f"{kernel.name}.py"
        path.write_text(re.sub(PAIRS_IN_PTX, PAIRS, re.sub(IN_PTX, r"\1.to(\2)", kernel.source)))
        self.function = getattr(load(path), kernel.name)
        self.kernel = kernel

    def run(self, *arguments: Any, stream: Any = None) -> None:
        names = list(self.kernel.meta["signature"])
        values = dict(zip(names, arguments, strict=False))
        default = REDUCTION if "r0_numel" in names else TILED if "ynumel" in names else POINTWISE
        tile = self.kernel.tile or default
        if tile is POINTWISE:
            tile = {"XBLOCK": max(POINTWISE["XBLOCK"], next_power_of_2(values["xnumel"] // PROGRAMS))}
        if tile is REDUCTION:  # as many elements where there are fewer rows
            high = min(tile["XBLOCK"], next_power_of_2(values["xnumel"]))
            tile = {**tile, "XBLOCK": high, "R0_BLOCK": tile["R0_BLOCK"] * tile["XBLOCK"] // high}
        blocks = {name: tile[name] for name in names if name in tile}
        grid = [-(-values["xnumel"] // blocks.get("XBLOCK", 1))]
        if "ynumel" in values:
            grid.append(-(-values["ynumel"] // blocks["YBLOCK"]))
        self.function[tuple(grid)](*arguments, **blocks)


def main(graph: Path, inputs: Path, outputs: Path) -> None:
    source = graph.read_text()
    for found, mended in ON_CPU.items():
        source = re.sub(found, mended, source, flags=re.MULTILINE)
    on_cpu = graph.with_name("on_cpu.py")
    on_cpu.write_text(source)
    compiler.folder = graph.parent
    mend_interpreter()
    module = load(on_cpu)
    vars(module).update({source_name(cls): cls for cls in (Gemm, Quantizer)})  # constants that ops take
    torch.save([tuple(module.call(list(run))) for run in torch.load(inputs)], outputs)


def mend_interpreter() -> None:
    mend_conversions()
    hasten_reductions()
    hasten_launches()


def mend_conversions() -> None:
    """Triton's interpreter (3.7 and 3.9) rounds fp32 to fp8 half away from zero, loses the carry into the exponent
    (7.99 becomes 4), has no NaN there, reads bf16 subnormals wrongly, and multiplies the bits of bf16 and fp8 matrices
    as integers; 3.9 keeps some masks as int64 and refuses them. Give it torch's conversions, to nearest even, as the
    hardware's, and a product of values."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    wrong = interpreter._convert_float
    low = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target in low:
            return torch.from_numpy(np.ascontiguousarray(value)).to(low[target]).view(torch.uint8).numpy()
        if source in low and target == tl.float32:
            return torch.from_numpy(np.ascontiguousarray(value)).view(low[source]).float().numpy().view(np.uint32)
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16).view(torch.uint16).numpy()
        if source == tl.bfloat16 and target == tl.float32:
            return np.left_shift(value.view(np.uint16).astype(np.uint32), 16)
        return wrong(value, source, target, rounding)

    narrow = (tl.bfloat16, *low)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = (
            convert(x.data, x.dtype, tl.float32, None).view(np.float32) if x.dtype in narrow else x.data for x in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(*wide, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    stored = builder.create_masked_store

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return stored(self, pointers, value, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *rest)

    interpreter._convert_float = convert
    builder.create_dot, builder.create_masked_store = dot, store


def hasten_reductions() -> None:
    """The interpreter takes Python steps for each element, where it does not know the function: here Inductor's
    maximum."""
    import numpy as np
    from torch._inductor.runtime.triton_helpers import maximum
    from triton.runtime.interpreter import ReduceOps

    by_element = ReduceOps.generic_reduce

    def reduce(self: Any, operands: Any) -> Any:
        # Both let NaN win.
        return self.min_max(operands[0], np.max) if self.combine_fn is maximum else by_element(self, operands)

    ReduceOps.generic_reduce = reduce


def hasten_launches() -> None:
    """The interpreter looks for its language's functions at each launch and at each call of a function, and makes a table
    of numpy's types for each tensor: a quarter of what it takes. Here both are made once, as this process does nothing
    but interpret."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    for language in (tl, tl.core):
        interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": language}))
    # 3.6 reads a scalar of one dimension as NumPy 2.4 no longer lets it.
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def numpy_type(of: Any) -> Any:
        return np.dtype(np.uint64) if isinstance(of.scalar, tl.pointer_type) else of_scalar(of.scalar)

    interpreter._get_np_dtype = numpy_type


class Compiler:
    """Stands where Inductor's AsyncCompile stands."""

    folder = Path()

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Interpreted:
        return Interpreted(_kernel(name, source), self.folder)

    def wait(self, scope: Any) -> None:
        pass


compiler = Compiler()

if __name__ == "__main__":
    # The generated code imports this module by its name: it must be this one, not a second copy.
    sys.modules["tests.offline.interpret"] = sys.modules["__main__"]
    main(*map(Path, sys.argv[1:]))
