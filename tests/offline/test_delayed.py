"""Delayed scaling's code for Hopper and Blackwell: each tensor is read once, by the kernel that makes it or casts
it."""

import math
import re
from pathlib import Path

import pytest
import torch

from te_inductor.recipes import DelayedScaling, Quantizer
from te_inductor.runtime.eager import delayed
from tests.bounds import assert_same_values
from tests.offline.harness import INTERPRETER, Generated, Kernel, compile_to_cubin, generate
from tests.oracle import casts
from tests.oracle.casts import ScalingHistory
from tests.support.contents import CONTENTS
from tests.support.cuda_code import launches
from tests.support.interpreted import interpret

ARCHS = (90, pytest.param(100, marks=pytest.mark.thorough))


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def training(arch: int) -> Generated:
    return generate("mlp_training_delayed", arch)


def low_outputs(kernel: Kernel) -> int:
    return sum(name.startswith("out_ptr") and "fp8" in kind for name, kind in kernel.meta["signature"].items())


def test_one_kernel_a_quantized_tensor(training: Generated) -> None:
    """Row copy and amax together, and both copies of dy. Gate and up are one weight in two pieces; the backward writes
    the column copies of weights and the norm's, and SwiGLU's beside the two halves of its gradient, whose amax is
    one."""
    kernels = {kernel.name: kernel for kernel in training.kernels}
    forward, backward = (
        [(low_outputs(kernels[name]), kernels[name].body.count("tl.atomic_max")) for name in launches(source)]
        for source in training.sources
    )
    # x behind its norm, gate, up, SwiGLU's output, down
    assert [counts for counts in forward if counts != (0, 0)] == [(1, 1)] * 5
    # three weights, x behind its norm, dy, the gradients of gate and up
    assert sorted(counts for counts in backward if counts != (0, 0)) == [(1, 0)] * 4 + [(2, 1), (5, 1)]


def test_layers_share_kernels(training: Generated) -> None:
    """A scale is a buffer of its own, whose place among the others no kernel has in its code: gate, up and down, which are
    equal in number, are cast by one kernel, and so are those of any other block. Products read the same buffers."""
    for kernel in training.kernels:
        assert not re.search(r"tl\.load\(\w+ \+ \([1-9]\d*\)\)", kernel.body), kernel.name
    for source in training.sources:
        numbers = re.findall(r"(\w+) = reinterpret_tensor\(\w+, \(1, 1\), \(1, 1\), \d+\)  # alias", source)
        others = [line for line in source.splitlines() if "(1, 1), (1, 1), " in line and "# alias" not in line]
        assert len(numbers) == len(set(numbers)) > 2 and not others
        assert not any(re.search(rf"del {name}\b|= {name}\b.*# reuse", source) for name in numbers)


def test_a_step_without_a_backward_copies_no_state() -> None:
    """Frozen layers in a program that has not left grad mode record amaxes."""
    [source] = generate("every_family", 90).sources
    assert "record_amax" in source and "aten.clone" not in source and "aten.copy_]" not in source


def test_a_norm_writes_its_row_copy_from_one_read(training: Generated) -> None:
    [norm] = [k for k in training.kernels if "rsqrt" in k.name and "tl.float8" in k.body]
    assert norm.tile == {"XBLOCK": 1, "num_warps": 4} and "for r0_offset" not in norm.body
    assert norm.body.count("tl.load(in_ptr0") == 1 and "tl.atomic_max" in norm.body


def test_no_kernel_reads_a_tensor_for_its_amax_alone(training: Generated) -> None:
    for kernel in training.kernels:
        if "tl.atomic_max" in kernel.body:
            assert "tl.float8" in kernel.body, kernel.name
        if "r0_numel" in kernel.meta["signature"]:  # reductions: the norm's, forward and backward
            assert "pow" in kernel.name, kernel.name


def test_scales_are_read_and_updated_once_a_graph(training: Generated) -> None:
    forward, backward = training.sources
    calls = [
        [source.count(f"= torch.ops.te_inductor.{op}.default(") for op in ("read_scales", "update_scales")]
        for source in (forward, backward)
    ]
    updates = [
        len(re.findall(r"^ *(?:buf\d+ = )?torch\.ops\.te_inductor\.update_scales", s, re.M)) for s in training.sources
    ]
    assert [reads for reads, _ in calls] == [1, 0] and updates == [1, 1]
    for source in training.sources:  # behind all kernels that record
        lines = source.splitlines()
        update = max(i for i, line in enumerate(lines) if "te_inductor.update_scales.default([" in line)
        assert update > max(i for i, line in enumerate(lines) if ".run(" in line and "quantize" in line)


def test_state_is_an_input_a_quantizer(training: Generated) -> None:
    """Each input takes the host time, as does each tensor that the backward gets: the scales are one."""
    forward, backward = training.sources
    [states] = re.findall(r"read_scales\.default\(\[([^]]*)\]", forward)
    number, inputs = len(states.split(", ")), r"^ *\w+ = rand_strided\((\([\d, ]*\)), .*float32\)$"
    made = re.findall(inputs, forward, re.MULTILINE)
    assert made.count("(1025, )") == number > 1 and "()" not in made
    given = re.findall(inputs, backward, re.MULTILINE)
    assert given.count(f"({2 * number}, {delayed.APART})") == 1 and "()" not in given


def test_every_kernel_compiles(training: Generated, arch: int, tmp_path: Path) -> None:
    for kernel in training.kernels:
        compiled = compile_to_cubin(kernel, arch, tmp_path)
        assert len(compiled.asm["cubin"]) > 0
        if "tl.atomic_max" in kernel.body:
            assert re.search(r"(atom|red)\.\S*max\.s32", compiled.asm["ptx"]), kernel.name


@pytest.mark.quick("recording_cast_padded-size1")
@pytest.mark.parametrize(("case", "size"), [("recording_cast", (80, 144)), ("recording_cast_padded", (70, 137))])
def test_casts_that_record(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    """Casts are equal in the interpreter, bit for bit, on awkward contents; an amax that was larger, or NaN, stays."""
    [source] = generate(case, 90).sources
    quantizer = Quantizer("e4m3")
    inputs = {
        (name, before): make(*size).to(torch.bfloat16)
        for name, make in CONTENTS.items()
        for before in ((0.0, 2.0**100, math.nan) if name in ("random", "nan") else (0.0,))
    }
    scale = torch.tensor(448 / 3)
    runs = [[torch.tensor(before), x, scale] for (_, before), x in inputs.items()]
    for (key, x), (data, data_t, amax) in zip(inputs.items(), interpret(source, runs, tmp_path), strict=True):
        assert_same_values(data, casts.quantize_known(x, scale.item(), quantizer)[0])
        assert_same_values(data_t, casts.quantize_known(x.t(), scale.item(), quantizer)[0])
        oracle = ScalingHistory(DelayedScaling(), quantizer.format, recorded=key[1])
        oracle.record(x)
        assert amax.item() == oracle.recorded or (amax.isnan() and math.isnan(oracle.recorded)), key


LONG = "long_rows_that_record"


@pytest.mark.parametrize(("case", "size"), [("rows_that_record", (40, 1104)), (LONG, (3, 16400))])
def test_rows_that_record(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    """A program holds a row, or loops over it and raises the amax once, behind the loop; what a mask leaves out counts
    neither in the amax nor in the copy."""
    generated = generate(case, 90)
    [kernel] = [kernel for kernel in generated.kernels if "tl.float8" in kernel.body]
    if case == LONG:
        [loop, rest] = re.search(r"tl\.float8.*", kernel.body, re.DOTALL)[0].split("_amax = ")  # type: ignore[index]
        assert "_turns = tl.maximum(" in loop and "atomic" not in loop and re.search(r"^ {4}tl\.atomic_max", rest, re.M)
    else:
        assert kernel.tile == {"XBLOCK": 1, "num_warps": 2} and kernel.body.count("tl.load(in_ptr0") == 1
    quantizer, scale = Quantizer("e4m3"), torch.tensor(448 / 3)
    contents = {name: CONTENTS[name] for name in (("random", "nan") if case == LONG else CONTENTS)}
    inputs = {name: make(*size).to(torch.bfloat16) for name, make in contents.items()}
    inputs["far from zero"] = (torch.randn(size) + 100).bfloat16()  # which what the mask leaves out is far from
    runs = [[x, torch.tensor(0.0), scale] for x in inputs.values()]
    for (name, x), (data, amax) in zip(inputs.items(), interpret(generated.sources[0], runs, tmp_path), strict=True):
        centred = x.float() - x.float().amax(1, keepdim=True)
        assert_same_values(data, casts.quantize_known(centred, scale.item(), quantizer)[0])
        oracle = ScalingHistory(DelayedScaling(), quantizer.format)
        oracle.record(centred)
        assert amax.item() == oracle.recorded or (amax.isnan() and math.isnan(oracle.recorded)), name


def test_the_kernels_of_a_steps_end() -> None:
    """Interpreted: bit for bit what plain torch does, of all contents, history lengths and algorithms."""
    done = INTERPRETER.run("tests.offline.scale_update_kernels")
    assert done.returncode == 0, done.stderr[-3000:]


LIMITS = ("largest", "least", "most", "outlying")


@pytest.mark.parametrize("reduced", [False, True])
def test_a_steps_end_compiles(reduced: bool, arch: int) -> None:
    """It compiles to one kernel without spills, and, where ranks reduce, another in front; divisions are rounded as
    IEEE has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from te_inductor.runtime.state.misfits import COUNTS
    from te_inductor.templates.triton.scale_updates import collect_amaxes, read_each, update_each

    def compiled(kernel, kinds: dict[str, str], constants: dict[str, object]) -> str:
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4}).asm["ptx"]

    kinds = {"table": "*i64", "misfits": "*i32", "count": "i32"} | dict.fromkeys(LIMITS, "fp32")
    kinds |= {"reduced": "*fp32"} if reduced else {}
    sizes = {"LENGTH": 1024, "BLOCK": 1024, "MOST_RECENT": False, "OWN": False, "TINY": 2.0**-126, "LARGEST": 3e38}
    sizes |= {"JUMP": 16.0, "COUNTS": COUNTS, "PATIENCE": 2, "FAILURE": 16, "FAILING": 256, "HEALS": reduced}
    ptx = compiled(update_each, kinds, sizes | ({} if reduced else {"reduced": None}))
    assert "div.rn.f32" in ptx and ".local" not in ptx and "bar.sync" in ptx
    if not reduced:
        kinds = {"table": "*i64", "out": "*fp32", "count": "i32", "scale_at": "i32"}
        assert "div.rn.f32" in compiled(read_each, kinds, {"BLOCK": 32, "APART": delayed.APART})
    else:
        assert compiled(collect_amaxes, {"table": "*i64", "out": "*fp32", "count": "i32"}, {"BLOCK": 32})
