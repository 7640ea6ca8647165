"""The NVFP4 kernels without a GPU: interpreted, their assembly line by line, as cubins, and in generated code."""

import collections
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from te_inductor.kernels import nvfp4_fp8 as prompts
from te_inductor.kernels.nvfp4_fp8 import PROMPT_ROWS, NVFP4PromptConfig
from te_inductor.kernels.nvfp4_linear import NVFP4Config, configured, streamed_memory, supports, table
from te_inductor.numerics import nvfp4
from te_inductor.templates.triton import (
    nvfp4_decode,
    nvfp4_direct,
    nvfp4_fp8,
    nvfp4_linear,
    nvfp4_streamed,
)
from tests.offline.harness import INTERPRETER, generate
from tests.support.cuda_code import TOUCHES, compiled, disassembled, triton
from tests.support.kernels import L40S, RTX5090, pretend
from tests.support.kernels import stored as problem

PATTERN = 0xFFFFFFFF


@pytest.mark.skipif(
    triton.__version__ < "3.7" and np.__version__ >= "2.4",
    reason="Triton 3.6 makes an int of an array, numpy 2.4 does not",
)
def test_interpreted():
    """The reference is plain torch: indices, masks, splits, planes; recast and dequantized bit for bit."""
    done = INTERPRETER.run("tests.offline.nvfp4_kernels")
    assert done.returncode == 0, done.stderr[-3000:]


def products(a: int, b: int) -> int:
    """mul.bf16x2: torch multiplies bf16 as fp32 does and rounds once, subnormals included."""
    halves = []
    for shift in (0, 16):
        x, y = (torch.tensor([(v >> shift) & 0xFFFF], dtype=torch.uint16).view(torch.bfloat16) for v in (a, b))
        halves.append(int((x * y).view(torch.uint16)[0]) << shift)
    return sum(halves)


def fused(a: int, b: int, c: int) -> int:
    """fma.rn.bf16x2, of products that are exact."""
    assert c == 0  # added, -0 becomes 0
    return sum(half << shift for shift in (0, 16) if (half := (products(a, b) >> shift) & 0xFFFF) != 0x8000)


def cast(high: int, low: int) -> int:
    """cvt.rn.satfinite.e4m3x2.f32, of values that E4M3 reaches."""
    made = torch.tensor([low, high], dtype=torch.uint32).view(torch.float32).to(torch.float8_e4m3fn)
    return int(made.view(torch.int16).item()) & 0xFFFF


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mov.b32": lambda a: a,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & PATTERN,
    "fma.rn.bf16x2": fused,
    "cvt.rn.satfinite.e4m3x2.f32": cast,
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
    pair = execute(nvfp4_decode.SCALE.value, {"$1": scale})["$0"]
    assert (as_bf16(pair) == factor.double() * 2.0**119).all()
    for other in (0, 0x7E):  # two scales in a word, each way
        assert execute(nvfp4_decode.SCALES.value, {"$2": scale | other << 8})["$0"] == pair
        assert execute(nvfp4_decode.SCALES.value, {"$2": other | scale << 8})["$1"] == pair
    for shift in range(16):
        codes = torch.arange(16, dtype=torch.uint8).roll(shift)[None]
        stored = nvfp4.store(codes)
        expected = nvfp4.values(stored, factor[None]).double().view(4, 2, 2)  # i, unit, half
        for unit, bits in enumerate(stored.view(torch.int32)[0].tolist()):
            found = execute(nvfp4_decode.VALUES.value, {"$4": bits & PATTERN, "$5": pair})
            for i in range(4):
                assert torch.equal(as_bf16(found[f"${i}"]) * nvfp4_decode.FACTOR, expected[i, unit])


@pytest.mark.parametrize(
    ("scale", "exponent"), [(0, 0), (1, 15), (1, -3), (7, 8), (0x38, 6), (0x38, -3), (0x45, 4), (0x45, -3), (0x7E, -3)]
)
def test_assembly_to_e4m3(scale, exponent):
    """All 16 codes in all places, times scales of every kind and a row's power of two: to nearest even, as torch
    casts."""
    factor = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn)
    power = 2.0**exponent  # at most what this scale allows
    bits = int(torch.tensor([power], dtype=torch.bfloat16).view(torch.int16))
    pair = execute(nvfp4_decode.SCALE.value, {"$1": scale})["$0"]
    pair = execute(nvfp4_decode.TIMES.value, {"$1": pair, "$2": bits | bits << 16})["$0"]
    for shift in range(16):
        stored = nvfp4.store(torch.arange(16, dtype=torch.uint8).roll(shift)[None])
        expected = (nvfp4.values(stored, factor[None]) * power).to(torch.float8_e4m3fn).float()
        low, high = (unit & PATTERN for unit in stored.view(torch.int32)[0].tolist())
        found = execute(nvfp4_decode.E4M3_VALUES.value, {"$4": low, "$5": high, "$6": pair})
        words = torch.tensor([found[f"${i}"] for i in range(4)], dtype=torch.uint32)
        assert torch.equal(words.view(torch.float8_e4m3fn).float(), expected[0])


def test_table():
    """Every measured config is supported where it was measured, and the fastest chosen there; near shapes get one that
    is supported, on later cards none of Hopper's own."""
    fastest = {}
    for row in table()["rows"]:
        measured = problem(row["m"], row["n"], row["k"])
        assert supports(NVFP4Config(**row["config"]), measured) is None
        fastest.setdefault(measured, row)
        assert fastest[measured]["us"] <= row["us"]
    for measured, row in fastest.items():
        assert configured(measured) == NVFP4Config(**row["config"])
        for m, dtype in itertools.product((1, 2, 5, 16, 17, 64, 100), (torch.bfloat16, torch.float16)):
            for n, k in ((row["n"], row["k"]), (row["n"] + 8, row["k"]), (512, 256), (32, 1024), (16, 768), (48, 2880)):
                for hopper in (True, False):
                    given = problem(m, n, k, dtype, hopper)
                    near = configured(given)
                    assert near is not None and supports(near, given) is None
                    assert hopper or near.kind != "streamed"
    assert [configured(problem(m, 4096, 4096, torch.bfloat16)).rows for m in (8, 9, 17, 33)] == [8, 16, 32, 64]
    assert [configured(problem(m, 4096, 4096, torch.bfloat16)).kind for m in (1, 3, 16, 64)] == [
        "direct",
        *3 * ["streamed"],
    ]
    for config in (
        configured(problem(0, 4096, 4096, torch.bfloat16)),
        NVFP4Config("streamed", 16, 64, 256, 2, 8, 2, 8),
    ):  # no rows
        x = nvfp4_linear.arranged(torch.empty(0, 4096), config)
        parts = torch.empty(4096, 2048), torch.empty(4096, 256), torch.empty(())
        assert nvfp4_linear.partial_sums(x, *parts, config, torch.float32).shape == (config.splits, 0, 4096)
    assert configured(problem(1, 4096, 4096, torch.float32)) is None
    assert configured(problem(1, 4096, 4096 + 16, torch.bfloat16)) is None
    small = replace(RTX5090.limits, shared_memory=99 * 2**10)  # a workstation GPU's
    plain = replace(problem(128, 6144, 4096), target=replace(RTX5090, limits=small))
    assert configured(plain).shared_memory <= small.shared_memory < configured(problem(128, 6144, 4096)).shared_memory
    assert configured(replace(plain, target=L40S)) is None


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (("streamed", 16, 64, 256, 2, 8, 2, 8), None),
        (
            ("streamed", 16, 64, 256, 2, 8, 2, 3),
            "3 stages for 2 parts",
        ),  # who waits would not know one filling from the next
        (("streamed", 16, 64, 256, 2, 16, 4, 4), "4 stages for 4 parts"),  # and for each other, without an end
        (("streamed", 64, 256, 256, 1, 16, 1, 2), "64 rows of x for 16 warps"),
        (("streamed", 4, 128, 256, 1, 8, 1, 3), "4 rows of x"),
        (("streamed", 16, 64, 256, 1, 4, 1, 3), "4 warps for 64 rows"),
        (("streamed", 16, 128, 256, 1, 8, 1, 9), "bytes of shared memory"),
        (("streamed", 16, 128, 128, 1, 8, 1, 3), "256 columns"),
        (("streamed", 16, 128, 256, 5, 8, 1, 3), "K=4096 is not a multiple"),
    ],
)
def test_streamed_refusals(given, refused):
    found = supports(NVFP4Config(*given), problem(16, 4096, 4096, torch.bfloat16))
    assert (found is None) if refused is None else (refused in str(found)), str(found)


def test_cubin():
    """wgmma's kernel, compiled for sm_90. Operands go to the tensor core as they are loaded: only copies write to
    shared memory before the sums are done."""
    config = NVFP4Config("plain", 16, 64, 256, 2, 4, 1, 3)
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


@pytest.mark.quick("1-4096-(8, 16, 1, 1, 1)", "5-14336-(8, 32, 1, 8, 2)")
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
    # A turn has, of 16 rows of the weight, 4 and as many pairs of scales, of 8 rows of x 8.
    weights, turns = loads["b16"], min(k // 256 // shape[3], 2)
    assert weights >= turns * shape[1] // 4 and loads["v4.b32"] == weights * (1 + 2 * (shape[0] // 8) * 16 // shape[1])
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.rindex("mma.sync")


@pytest.mark.quick("(8, 64, 2, 8)-bf16", "(32, 64, 2, 6)-fp16")
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape", [(8, 64, 2, 8), (16, 128, 1, 3), (16, 256, 1, 4), (32, 64, 2, 6), (64, 128, 1, 4)], ids=str
)
def test_streamed_cubin(shape, kind, tmp_path):
    """It is as the kernel for prompts: products run while the next operands are decoded, no register that one in flight
    reads is written, nothing is spilled. Memory is touched behind the wait by the loading warp, else behind the
    products."""
    rows, block_n, shares, _ = shape
    boxes = zip(("x", "units", "scales"), (kind, "i32", "i16"), nvfp4_streamed.boxes(rows, block_n), strict=True)
    types = {name: f"tensordesc<{kind}{box.shape},{box.layout!r}>" for name, kind, box in boxes}
    types |= {"tensor_scale": "*fp32", "out": f"*{kind}"}
    made = compiled(nvfp4_streamed._linear, nvfp4_streamed.constants(*shape), types, nvfp4_streamed.options(*shape))
    assert made.metadata.shared <= streamed_memory(*shape) <= 227 * 1024
    lines = disassembled(made.asm["cubin"], tmp_path)
    operations = [line.split()[0] for line in lines]
    assert not any(operation.startswith(("LDL", "STL")) for operation in operations)
    groups = block_n // 64 * shares
    assert sum(line.startswith("HGMMA") for line in lines) == groups * 2 * 16  # the last turn is written out
    assert sum(line.startswith("WARPGROUP.DEPBAR") for line in lines) == groups * 3
    assert not overwritten(lines)
    copies = [place for place, operation in enumerate(operations) if operation.startswith("UTMALDG")]
    assert len(copies) >= 2 * 6 and not any(operation.startswith(("LDGSTS", "ATOM", "RED")) for operation in operations)
    ptx = made.asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == 1 and ptx.count("griddepcontrol.launch_dependents") == block_n // 64
    assert "cp.async.bulk" not in ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"(ld|st)\.global", ptx[: ptx.index("griddepcontrol.launch_dependents")])


def test_parts_of_prompts():
    """K is cut into as many parts as fill the card, also where they differ by a block of columns."""
    for m, n, k, rows, splits in (
        (256, 2560, 9728, 256, 6), (128, 5120, 13824, 128, 3), (256, 4096, 14336, 256, 4), (256, 6144, 4096, 128, 1),
        (100, 512, 256, 128, 1),
    ):  # fmt: skip
        assert prompts.configured(m, n, k) == NVFP4PromptConfig(rows, splits)


@pytest.mark.quick("192-4096-14336-2", "128-70-256-1")
@pytest.mark.parametrize(
    ("rows", "n", "k", "splits"),
    [(256, 4096, 14336, 4), (256, 2560, 9728, 6), (192, 4096, 14336, 2), (160, 4096, 4096, 1), (128, 70, 256, 1)],
    ids=str,
)
def test_fp8_cubin(rows, n, k, splits, tmp_path):
    """Products run while the next operands are decoded: nobody waits between the two of a turn, and no register that
    one in flight reads is written, as which of them ptxas sees is not documented. Nothing is spilled, x and the weight
    come as copies of the loading warp, and pairs of y are stored."""
    constants = nvfp4_fp8.constants(n, k, NVFP4PromptConfig(rows, splits))
    boxes = zip(("x", "units", "scales"), ("fp8e4nv", "i32", "u8"), nvfp4_fp8.boxes(rows), strict=True)
    types = {name: f"tensordesc<{kind}{box.shape},{box.layout!r}>" for name, kind, box in boxes}
    out = "*bf16" if splits == 1 else "*fp32"
    types |= {"x_scale": "*fp32", "block_scale": "*i32", "tensor_scale": "*fp32", "out": out}
    made = compiled(nvfp4_fp8._linear, constants, types, nvfp4_fp8.options())
    assert made.metadata.shared <= 227 * 1024
    lines = disassembled(made.asm["cubin"], tmp_path)
    operations = [line.split()[0] for line in lines]
    assert not any(operation.startswith(("LDL", "STL")) for operation in operations)
    assert {o for o in operations if o.startswith("STG")} == {"STG.E" if splits == 1 else "STG.E.64"}
    products = [line for line in lines if line.startswith("QGMMA")]
    turns = 1 if k == 256 * splits else 2  # the last is written out
    parts = rows.bit_count()
    assert len(products) == 2 * turns * 8 * parts
    assert sum(line.startswith("WARPGROUP.DEPBAR") for line in lines) == 2 * (2 * turns - 1)
    assert not overwritten(lines)


def overwritten(lines: list[str]) -> list[str]:
    """Writes to the left operands, in registers, of products that are under way: of those behind a wait for all."""
    flights: list[set[int]] = [set()]  # of groups of products, the last one open
    found = []
    for line in lines:
        operation, _, operands = line.partition(" ")
        registers = [int(register) for register in re.findall(r"\bR(\d+)", operands)]
        if operation.startswith(("QGMMA", "HGMMA")):
            flights[-1] |= set(range(registers[1], registers[1] + 4))
            if "gsb0" in operands:
                flights.append(set())
        elif operation.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rpartition(",")[2], 16)
            flights = [*flights[:-1][len(flights) - 1 - left :], set()]
        elif registers and not operation.startswith(("ST", "SYNCS", "BAR", "UTMA", "R2UR")):
            wide = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
            written = set(range(registers[0], registers[0] + wide))
            found += [line for flight in flights if flight & written]
    return found


def test_attention_waits():
    """Compiled for sm_90: neither kernel touches memory before its wait, and the tensor core multiplies."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from te_inductor.templates.triton import decode_attention

    halves, fp32 = dict.fromkeys(("q", "k", "v", "out"), "*bf16"), dict.fromkeys(("sums", "tops", "totals"), "*fp32")
    types = {**halves, **fp32, "keep": "*i1", "scale": "fp32"}
    constants = {
        "D": 128,
        "ROWS": 8,
        "BLOCK": 64,
        "STAGES": 2,
        "CHUNKS": 16,
        "ASSEMBLY": True,
        "ZEROS": True,
        "k_d": 1,
        "v_d": 1,
    }
    for function, instruction in ((decode_attention._parts, "mma"), (decode_attention._together, "griddepcontrol")):
        names = function.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        given = {(place,): constants[name] for place, name in enumerate(names) if name in constants}
        source = ASTSource(fn=function, signature=signature, constexprs=given)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        assert instruction in ptx and not re.search(TOUCHES, ptx[: ptx.index("griddepcontrol.wait")])


@pytest.mark.quick("decode_nvfp4-direct", "decode_nvfp4_batch-streamed")
@pytest.mark.parametrize(
    ("case", "kind"),
    [("decode_nvfp4", "direct"), ("decode_nvfp4_batch", "streamed"), ("decode_nvfp4_dynamic", "streamed")],
)
def test_generated_decode(case, kind):
    """A step of generation: three kernels of ours, whose sums are added up in the kernels of SwiGLU and of the
    residual."""
    code = generate(case, 90)
    [source] = code.sources
    assert source.count(f"Config(kind='{kind}'") == 3
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


def test_store_cubin():
    from te_inductor.templates.triton import nvfp4_store
    from tests.support.cuda_code import compiled, spilled

    types = {"weight": "*bf16", "amax": "*fp32", "stored": "*u8", "block_scale": "*fp8e4nv", "tensor_scale": "*fp32"}
    for kernel in (nvfp4_store._raise_amax, nvfp4_store._store):
        taken = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        assert spilled(compiled(kernel, {"BLOCKS": 64}, taken, {"num_warps": 4}, multiples=())) == 0


def test_generated_attention():
    """Two products and a softmax are one op, which reads the cache where it lies; an arg max is one of pieces."""
    code = generate("decode_attention_nvfp4", 90)
    [source] = code.sources
    assert "extern_kernels.bmm" not in source and "softmax" not in source
    [call] = re.findall(r"decode_attention\.default\((.*)\)", source)
    assert call.count("131072, 128, 1)") == 2, call  # keys and values where they lie, no copy of them
    names = [kernel.name for kernel in code.kernels]
    assert len(names) == 3 and all("argmax" in name for name in names[1:]), names
    assert all("gdc_wait" in kernel.body for kernel in code.kernels)


def test_realized():
    """Sums are realized where halves of q, k and v are turned, and not where gate and up are one layer."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from te_inductor.lowerings.gemm.partial_sums import _is_cut_twice

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


def test_generated_prompt():
    """A short one: FP8 values of the weights as they are multiplied, x in their order from the kernel that casts it."""
    code = generate("prompt_nvfp4", 90)
    [source] = code.sources
    assert source.count("nvfp4_fp8_partial_sums.default(") == 3
    assert "recast" not in source and "_scaled_mm(" not in source and "extern_kernels.mm" not in source
    assert "gdc_wait" not in source
    assert len(code.kernels) == 3  # the norm's cast, SwiGLU's, the residual
    assert not any(re.search(r"clone|permute", kernel.name) for kernel in code.kernels)


@pytest.mark.thorough
def test_generated_prompt_of_any_length():
    """One graph for all that are not few rows: its op asks how many there are when it runs."""
    [source] = generate("prompt_nvfp4_dynamic", 90).sources
    assert source.count("nvfp4_linear_fp8.default(") == 3 and "recast" not in source and "partial_sums" not in source


def test_prompts_of_many_rows(monkeypatch):
    """The op, behind as many rows as its kernel takes: the cast and the library's GEMM, here on a CPU."""
    from te_inductor.templates.triton import stored_ops

    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(stored_ops, "nvfp4_expand", nvfp4)
    codes, *scales = nvfp4.quantize(torch.randn(24, 256))
    weight = nvfp4.store(codes), *scales
    x, x_scale = torch.randn(PROMPT_ROWS + 1, 256).to(torch.float8_e4m3fn), torch.rand(513, 1)
    y = stored_ops._linear_fp8(x, x_scale, *weight, torch.float32)
    expected = nvfp4.linear_fp8(x, x_scale, *weight, torch.float32)
    assert torch.linalg.vector_norm(y - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_generated_prefill():
    """A long prompt: weights cast to E4M3, FP8 GEMMs; gate and up share the cast of their input."""
    code = generate("prefill_nvfp4", 90)
    [source] = code.sources
    assert "gdc_wait" not in source and not any(kernel.meta["launch_pdl"] for kernel in code.kernels)
    assert source.count("nvfp4_recast.default(") == 3 and source.count("extern_kernels._scaled_mm(") == 3
    assert source.count("use_fast_accum=True") == 3
