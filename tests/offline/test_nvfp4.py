"""The NVFP4 kernels without a GPU: interpreted, their assembly line by line, as cubins, and in generated code."""

import collections
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from te_inductor.runtime import nvfp4
from tests.offline.harness import HERE, generate

triton = pytest.importorskip("triton")

from te_inductor.templates.triton import nvfp4_decode, nvfp4_direct, nvfp4_linear  # noqa: E402
from te_inductor.templates.triton.nvfp4_linear import Config, Problem, choose, supports, table  # noqa: E402

PATTERN = 0xFFFFFFFF
TOUCHES = r"(ld|st)\.global|cp\.async|atom|red\."  # memory, in PTX


@pytest.mark.skipif(
    triton.__version__ < "3.7" and np.__version__ >= "2.4",
    reason="Triton 3.6 makes an int of an array, numpy 2.4 does not",
)
def test_interpreted():
    """Against plain torch: indices, masks, splits, planes; recast and dequantized bit for bit."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.offline.nvfp4_kernels"]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def products(a: int, b: int) -> int:
    """mul.bf16x2: torch multiplies bf16 as fp32 does and rounds once, subnormals included."""
    halves = []
    for shift in (0, 16):
        x, y = (torch.tensor([(v >> shift) & 0xFFFF], dtype=torch.uint16).view(torch.bfloat16) for v in (a, b))
        halves.append(int((x * y).view(torch.uint16)[0]) << shift)
    return sum(halves)


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mov.b32": lambda a: a,
    "mul.lo.u32": lambda a, b: (a * b) & PATTERN,
    "shl.b32": lambda a, turn: (a << turn) & PATTERN,
    "shf.l.wrap.b32": lambda low, high, turn: ((high << turn) | (low >> (32 - turn))) & PATTERN,
    "mul.bf16x2": products,
}


def execute(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """The few PTX instructions that the kernels are written in."""
    for line in re.findall(r"([a-z0-9.]+) ([^;]+);", assembly.strip().removeprefix("{")):
        name, operands = line[0], [operand.strip("{} ") for operand in line[1].split(",")]
        if name == ".reg":
            continue
        if line[1].startswith("{"):  # halves of a register
            registers |= {operands[0]: registers[operands[2]] & 0xFFFF, operands[1]: registers[operands[2]] >> 16}
            continue
        if line[1].endswith("}"):  # and a register of halves
            registers[operands[0]] = registers[operands[1]] | registers[operands[2]] << 16
            continue
        values = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
        registers[operands[0]] = OPERATIONS[name](*values)
    return registers


def as_bf16(pair: int) -> Tensor:
    return torch.tensor([pair & 0xFFFF, pair >> 16], dtype=torch.uint16).view(torch.bfloat16).double()


@pytest.mark.parametrize("scale", [0, 1, 7, 8, 0x38, 0x45, 0x7E])  # zero, subnormals, 1, 448
def test_assembly(scale):
    """All 16 codes in all places, times scales of every kind: exact, times 2**-7."""
    factor = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn)
    pair = execute(nvfp4_decode._SCALE.value, {"$1": scale})["$0"]
    assert (as_bf16(pair) == factor.double() * 2.0**119).all()
    for other in (0, 0x7E):  # two scales in a word, each way
        assert execute(nvfp4_direct._SCALES.value, {"$2": scale | other << 8})["$0"] == pair
        assert execute(nvfp4_direct._SCALES.value, {"$2": other | scale << 8})["$1"] == pair
    for shift in range(16):
        codes = torch.arange(16, dtype=torch.uint8).roll(shift)[None]
        stored = nvfp4.store(codes)
        expected = nvfp4.values(stored, factor[None]).double().view(4, 2, 2)  # i, unit, half
        for unit, bits in enumerate(stored.view(torch.int32)[0].tolist()):
            found = execute(nvfp4_decode.VALUES.value, {"$4": bits & PATTERN, "$5": pair})
            for i in range(4):
                assert torch.equal(as_bf16(found[f"${i}"]) * nvfp4_decode.FACTOR, expected[i, unit])


def test_table():
    """Every measured config is supported where it was measured, and chosen there; near shapes get one that is supported."""
    for row in table()["rows"]:
        problem = Problem(row["m"], row["n"], row["k"], torch.bfloat16)
        assert supports(Config(**row["config"]), problem) is None
        assert choose(problem) == Config(**row["config"])
        for m in (1, 5, 16, 17, 64):
            for n, k in ((row["n"], row["k"]), (row["n"] + 8, row["k"]), (512, 256), (32, 1024), (16, 768)):
                near = choose(Problem(m, n, k, torch.float16))
                assert near is not None and supports(near, Problem(m, n, k, torch.float16)) is None
    assert (
        choose(Problem(8, 4096, 4096, torch.bfloat16)).rows == 8
        and choose(Problem(9, 4096, 4096, torch.bfloat16)).rows == 16
    )
    assert choose(Problem(1, 4096, 4096, torch.float32)) is None
    assert choose(Problem(1, 4096, 4096 + 16, torch.bfloat16)) is None


def test_cubin():
    """wgmma's kernel, compiled for sm_90. Operands go to the tensor core as they are loaded: only copies write to shared
    memory before the sums are done."""
    config = Config(16, 64, 256, 2, 4, 3, direct=False)
    constants = {
        "K": 4096, "ROWS": config.rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "SPLITS": config.splits,
        "STAGES": config.stages, "FACTOR": nvfp4_linear.FACTOR, "ASSEMBLY": True,
    }  # fmt: skip
    types = {"x": "*bf16", "stored": "*i16", "block_scale": "*u8", "tensor_scale": "*fp32", "out": "*fp32"}
    made = compiled(nvfp4_linear._partial_sums, constants, types, {"num_warps": config.warps})
    ptx, instruction = made.asm["ptx"], "wgmma.mma_async"
    assert made.asm["cubin"] and instruction in ptx and "mul.bf16x2" in ptx and "cp.async" in ptx
    assert "st.shared" not in ptx[: ptx.rindex(instruction)] and "shfl" not in ptx
    assert made.metadata.shared <= config.shared_memory
    # Nothing before the wait: Note [Kernels that start early].
    assert not re.search(TOUCHES, ptx[: ptx.index("griddepcontrol.wait")])
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.rindex(instruction)
    assert ptx.count("wgmma.wait_group") >= ptx.count("wgmma.mma_async") // (config.block_k // 64)  # once a product


@pytest.mark.parametrize(
    ("m", "k", "shape"),
    [
        (1, 4096, (8, 16, 1, 1, 1)),
        (16, 4096, (16, 16, 1, 1, 1)),
        (5, 14336, (8, 32, 1, 8, 2)),
        (1, 256, (8, 16, 1, 1, 1)),
    ],
    ids=str,
)
def test_direct_cubin(m, k, shape):
    """No shared memory but for the sums of several warps, nothing that moves between lanes, and wide loads."""
    constants = nvfp4_direct.constants(m > 1, m, k, *shape)
    types = {"x": "*bf16", "stored": "*i32", "block_scale": "*u16", "tensor_scale": "*fp32", "out": "*bf16"}
    made = compiled(nvfp4_direct._linear, constants, types, nvfp4_direct.options(shape[1], shape[3]))
    ptx = made.asm["ptx"]
    before, loop = ptx[: ptx.index("griddepcontrol.wait")], ptx[: ptx.rindex("mma.sync")]
    assert made.asm["cubin"] and not re.search(TOUCHES, before)
    assert not re.search(r"(ld|st)\\.shared|shfl", loop) and (shape[3] > 1 or made.metadata.shared == 0)
    loads = collections.Counter(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+) ", loop))
    assert set(loads) == {"v4.b32", "b16"}
    # Of a turn: of 16 rows of the weight 4 and as many pairs of scales, of 8 rows of x 8.
    weights, turns = loads["b16"], min(k // 256 // shape[3], 2)
    assert weights >= turns * shape[1] // 4 and loads["v4.b32"] == weights * (1 + 2 * (shape[0] // 8) * 16 // shape[1])
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.rindex("mma.sync")


def compiled(function, constants, types, options):
    """For sm_90, pointers and N aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in places}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in (*types, "N")}
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(
        fn=function, signature=signature, constexprs={places[k]: v for k, v in constants.items()}, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_attention_waits():
    """Compiled for sm_90: neither kernel touches memory before its wait, and the tensor core multiplies."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from te_inductor.templates.triton import few_queries

    halves, fp32 = dict.fromkeys(("q", "k", "v", "out"), "*bf16"), dict.fromkeys(("sums", "tops", "totals"), "*fp32")
    types = {**halves, **fp32, "keep": "*i1", "scale": "fp32"}
    constants = {"D": 128, "ROWS": 8, "BLOCK": 64, "STAGES": 2, "CHUNKS": 16, "ASSEMBLY": True, "k_d": 1, "v_d": 1}
    for function, instruction in ((few_queries._parts, "mma"), (few_queries._together, "griddepcontrol")):
        names = function.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        given = {(place,): constants[name] for place, name in enumerate(names) if name in constants}
        source = ASTSource(fn=function, signature=signature, constexprs=given)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        assert instruction in ptx and not re.search(TOUCHES, ptx[: ptx.index("griddepcontrol.wait")])


@pytest.mark.parametrize("case", ["decode_nvfp4", "decode_nvfp4_dynamic"])
def test_generated_decode(case):
    """A step of generation: three kernels of ours, whose sums are added up in the kernels of SwiGLU and of the residual."""
    code = generate(case, 90)
    [source] = code.sources
    assert (
        source.count("nvfp4_partial_sums.default(") == 3
        and "_scaled_mm(" not in source
        and "extern_kernels.mm" not in source
    )
    assert len(code.kernels) == 3
    assert "silu" in code.kernels[1].name and "sum" not in source.split("def call")[0].split("async_compile.triton(")[0]
    for kernel in code.kernels:  # Note [Kernels that start early]
        before, wait, behind = kernel.body.partition("tl.extra.cuda.gdc_wait()")
        assert wait and "tl." not in before.replace("tl.constexpr", "") and kernel.meta["launch_pdl"]
        assert "gdc_wait" not in behind and "gdc_launch_dependents()" in behind
    assert "triton_per" in code.kernels[0].name  # the norm takes a row at once


def test_generated_attention():
    """Two products and a softmax are one op, which reads the cache where it lies; an arg max is one of pieces."""
    code = generate("decode_attention_nvfp4", 90)
    [source] = code.sources
    assert "extern_kernels.bmm" not in source and "softmax" not in source
    [call] = re.findall(r"few_queries\.default\((.*)\)", source)
    assert call.count("(131072, 1, 128)") == 1 and call.count("(131072, 128, 1)") == 1  # keys turned, no copy of them
    names = [kernel.name for kernel in code.kernels]
    assert len(names) == 3 and all("argmax" in name for name in names[1:]), names
    assert all("gdc_wait" in kernel.body for kernel in code.kernels)


def test_realized():
    """Where halves of q, k and v are turned, and not where gate and up are one layer."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from te_inductor.lowerings.partial_sums import _is_cut_twice

    def turned(x: Tensor) -> Tensor:
        q, k = x.view(1, -1, 6).split((4, 2), 2)
        a, b = q.transpose(0, 1).chunk(2, -1)
        return a * b + k

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    for function, cut in ((turned, True), (gated, False)):
        graph = make_fx(function)(torch.randn(5, 6)).graph
        assert _is_cut_twice(next(iter(graph.nodes))) is cut


def test_generated_prefill():
    """A prompt: weights cast to E4M3, FP8 GEMMs; gate and up share the cast of their input."""
    code = generate("prefill_nvfp4", 90)
    [source] = code.sources
    assert "gdc_wait" not in source and not any(kernel.meta["launch_pdl"] for kernel in code.kernels)
    assert source.count("nvfp4_recast.default(") == 3 and source.count("extern_kernels._scaled_mm(") == 3
    assert source.count("use_fast_accum=True") == 3
