"""A gated activation's backward in the GEMM in front of it, without a GPU: generated code, and the kernel's machine
code."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch

from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels import cutlass_tiles as template
from te_inductor.numerics.activation import Gating
from te_inductor.templates.cutlass import build
from tests.offline.harness import generate
from tests.support.cuda_code import machine_code
from tests.support.gated_dgrad import GATES, backward, folded, operands, pretended, traced  # noqa: F401
from tests.support.kernels import dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.quick("cutlass_gated")
@pytest.mark.parametrize("case", ["cutlass_gated", "cutlass_gated_checkpointed"])
def test_generated_code(case):
    """gate and up are read where the GEMM of both has left them, both copies go to the next GEMMs, and no kernel of
    Triton's computes a gradient of the activation."""
    backward = generate(case, 90).sources[-1]
    [call] = re.findall(r"(buf\d+) = torch\.ops\.te_inductor\.cutlass_gated_gradient\.default\((.*)", backward)
    half = r"(?:getitem_\d+|reinterpret_tensor\(buf\d+, \(16384, 8192\), \(16384, 1\), (?:0|8192)\))"
    assert re.search(rf"{half}, {half}, te_inductor_recipes_quantizers_Gemm\(name='dgrad'", call[1])
    copies = [re.search(rf"(buf\d+) = {call[0]}\[{place}\]", backward)[1] for place in (0, 2)]
    gemms = [line for line in backward.splitlines() if "scaled_mm(" in line and "extern_kernels" in line]
    assert all(any(f"scaled_mm({copy}, " in line for line in gemms) for copy in copies)
    launches = re.findall(r"(triton_\w+)\.run\(", backward)
    assert not any("sigmoid" in name for name in launches)
    assert sum("silu" in name for name in launches) == (1 if case == "cutlass_gated_checkpointed" else 0)


@pytest.mark.thorough
def test_what_a_bias_wants_is_computed_as_ever():
    backward = generate("cutlass_gated_bias", 90).sources[-1]
    assert "cutlass_gated_gradient" not in backward and "quantize_pieces" in backward


def test_column_copies_of_weights_alone():
    """A tile under scales of square blocks is a whole block: half of one failed the compile, which took the model to
    high precision."""
    sources = generate("checkpointed_block", 90).sources
    assert [source.count("extern_kernels._scaled_mm(") for source in sources] == [2, 5]  # gate's and up's fprop again
    assert not any(".mm(" in source for source in sources)


@pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed")
@pytest.mark.thorough
@pytest.mark.usefixtures("pretended")
def test_machine_code(tmp_path):
    """The code of each cluster and of two activations: the product's loop is the other kernel's, nothing is spilled,
    both copies leave by the copy engine, and what crosses shared memory on its way is 16 bits wide or more."""
    gatings = {name: folded(traced(backward(GATES[name]), operands()))[0].args[7] for name in ("silu", "gelu_tanh")}
    asked = []
    for tile, name, element in zip(
        template.BLOCK_TILES, ("silu", "gelu_tanh", "silu"), (E4M3, E4M3, E5M2), strict=True
    ):
        problem = dense(1024, 1024, 1024, "128x128", False, out=element, gating=gatings[name])
        assert template.supports(tile, problem)
        asked.append(template.kernel(problem, tile))
    command = [sys.executable, "-m", "tests.offline.cutlass_kernels"]
    command += [json.dumps([dataclasses.asdict(kernel) for kernel in asked]), str(tmp_path)]
    done = subprocess.run(command, env=build.environment("90"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for number in range(len(asked)):
        code = machine_code(tmp_path / f"{number}.o")
        assert len(re.findall(r"\bQGMMA", code)) == 8 and len(re.findall(r"\bWARPGROUP\.DEPBAR", code)) == 2
        assert not re.search(r"\b(STL|LDL|LDS\.U8|STS\.U8)\b", code)
        assert len(re.findall(r"\bUTMASTG", code)) == 8
        stored = re.findall(r"\bSTSM\.16\.(MT?88\.4)\b", code)
        assert stored.count("M88.4") == stored.count("MT88.4") == 16


@pytest.mark.parametrize("step", ["sigmoid", "tanh", "erf"])
def test_what_was_not_measured_is_not_chosen(step):
    """The table is of SwiGLU."""
    gating = Gating(((step, 1), ("mul", 0, 3)), (4, 4))
    problem = dense(16384, 14336, 4096, "128x128", False, out=E4M3, gating=gating)
    assert (tables.choose(problem) is not None) == (step == "sigmoid")


def test_clusters_divide_what_two_matrices_share():
    """A tile beyond the edge of dgate would be dup's."""
    some = Gating((("mul", 0, 1), ("mul", 0, 2)), (3, 4))
    for tile in template.BLOCK_TILES:
        for (m, n), fits in {
            (1024, 1024): True,
            (768, 1024): tile.cluster_m == 1,
            (1024, 1152): tile.cluster_n == 1,
        }.items():
            assert template.supports(tile, dense(m, n, 512, "128x128", False, out=E4M3, gating=some)) == fits
