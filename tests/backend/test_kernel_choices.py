"""A table of the kernels that run problems, by device; and that nothing but `kernels` and `targets` knows of them."""

import ast

import pytest
import torch

import te_inductor
from te_inductor.command.gemm_arms import GELU, SWIGLU
from te_inductor.kernels import cutlass, fp8_small_m, nvfp4_linear
from te_inductor.kernels.cutlass_tiles import Tile
from te_inductor.kernels.problem import (
    ANOTHER,
    DENSE,
    GROUPED,
    OUTPUT,
    STORED,
    STORED_EXPERTS,
    Epilogue,
    Problem,
    Program,
    Sizes,
    Stored,
)
from te_inductor.kernels.select import FAMILIES, select
from te_inductor.recipes import Gemm
from tests.house import nodes
from tests.support.kernels import B200, BF16, CPU, H200, L40S, RTX5090

E4M3, FP16, FP32 = torch.float8_e4m3fn, torch.float16, torch.float32
BLOCKS = ("1x128", "128x128")
GEMMS = {
    "tensor": Gemm("fprop", True),
    "tensor dgrad": Gemm("dgrad", False, elements=("e5m2", "e4m3")),
    "row": Gemm("fprop", True, ("row", "row")),
    "row wgrad": Gemm("wgrad", False, ("row", "row")),
    "blocks": Gemm("fprop", False, BLOCKS),
    "blocks wgrad": Gemm("wgrad", False, ("1x128", "1x128")),
    "mxfp8": Gemm("fprop", False, ("1x32", "1x32")),
    "mxfp6": Gemm("fprop", False, ("1x32", "1x32"), ("e3m2", "e3m2")),
    "mxfp4": Gemm("fprop", False, ("1x32", "1x32"), ("e2m1", "e2m1")),
    "nvfp4": Gemm("fprop", False, ("1x16", "1x16"), ("e2m1", "e2m1")),
    "stored nvfp4": nvfp4_linear.PREFILL,
    "high dgrad": Gemm.of_high_precision("dgrad"),
    "row, one order": Gemm("fprop", False, ("row", "row"), fixed_order=True),
}
EPILOGUES = {
    "bias": Epilogue(bias=True),
    "adds another": Epilogue(added=ANOTHER),
    "adds": Epilogue(added=OUTPUT),
    "max-autotune, adds": Epilogue(added=OUTPUT),
    "gelu": Epilogue(activation=GELU),
    "swiglu": Epilogue(gating=SWIGLU),
}
PROGRAMS = {
    "max-autotune": Program(autotunes=True),
    "max-autotune, adds": Program(autotunes=True),
    "cpp": Program(cpp_wrapper=True),
    "leaves": Program(cpp_wrapper=True, leaves=True),
}
OUT = {"adds": FP32, "max-autotune, adds": FP32, "fp32": FP32, "gelu": E4M3, "swiglu": E4M3, "fp16": FP16}
EXPERTS = 8
DEVICES = (H200, B200, L40S, RTX5090, CPU)
CUBLASLT, INDUCTOR, EMULATED, EAGER = "cublaslt", "inductor", "emulated", "eager"
HIGH = "high_precision"
SMALL_M, GROUPED_MM, LIBRARY = "triton:fp8_small_m", "triton:grouped_mm", "cutlass:_scaled_grouped_mm"
NVFP4, PROMPT, DECODE = "triton:nvfp4_linear", "triton:nvfp4_fp8", "triton:experts_decode"
ACROSS, DOWN, SPLIT, QUANTIZED, BLOCK, BLOCK_PAIR = (  # CUTLASS's tiles
    f"cutlass:{Tile(*shape)}"
    for shape in (
        (192, 128, 1, 2, True, 8), (192, 128, 2, 1, True, 16), (128, 128, 2, 1, False, 8),
        (128, 128, 2, 1, True, 8), (256, 128, 1, 1, False, 8), (256, 128, 1, 2, False, 8),
    )
)  # fmt: skip
# A form, M, N and K, operands, what else is asked; then what runs on each of DEVICES.
CHOICES = [
    (DENSE, (1, 4096, 4096), "tensor", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (1, 4096, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4096), "tensor", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (64, 4096, 4096), "tensor", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (64, 4096, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (128, 4096, 4096), "tensor", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (128, 4096, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (256, 4096, 4096), "tensor", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (256, 4096, 4096), "row", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (4096, 4096, 4096), "tensor", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (4096, 4096, 4096), "row", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 4096, 4096), "tensor", "", DOWN, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 4096, 4096), "row", "", ACROSS, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (128, 2560, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (200, 2560, 4096), "row", "", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (256, 14336, 4096), "row", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 32, 4096), "row", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4112), "row", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 4096, 6144), "tensor dgrad", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 4096, 6144), "row wgrad", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 4096, 6144), "blocks", "", BLOCK, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 6144), "blocks wgrad", "", CUBLASLT, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 6144), "mxfp8", "", EMULATED, CUBLASLT, EMULATED, EMULATED, EMULATED),
    (DENSE, (16384, 4096, 6144), "nvfp4", "", EMULATED, CUBLASLT, EMULATED, EMULATED, EMULATED),
    (DENSE, (16384, 4096, 6144), "mxfp4", "", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (DENSE, (16384, 4096, 6144), "mxfp6", "", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    *((DENSE, (m, 4096, 4096), "row, one order", more, *5 * ("fixed_order",)) for m in (1, 4096) for more in ("", "adds")),
    (DENSE, (16384, 4096, 6144), "high dgrad", "", HIGH, HIGH, HIGH, HIGH, HIGH),
    (DENSE, (16384, 6144, 4096), "tensor", "bias", ACROSS, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "adds another", ACROSS, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "fp32", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "fp16", ACROSS, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "max-autotune", INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "cpp", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "leaves", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 6144, 4096), "tensor", "symbolic", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (6144, 4096, 16384), "tensor dgrad", "adds", SPLIT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (6144, 4096, 16384), "tensor dgrad", "max-autotune, adds", SPLIT, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (8192, 16384, 4096), "tensor", "gelu", QUANTIZED, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (8192, 1024, 4096), "tensor", "gelu", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16384, 14336, 4096), "blocks", "swiglu", BLOCK_PAIR, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 14336), "blocks", "adds another", BLOCK, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 14336), "blocks", "max-autotune", CUBLASLT, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 1408), "blocks", "", CUBLASLT, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 128), "blocks", "", CUBLASLT, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (DENSE, (16384, 4096, 4096), "mxfp8", "max-autotune", EMULATED, INDUCTOR, EMULATED, EMULATED, EMULATED),
    (DENSE, (16384, 4096, 4096), "nvfp4", "max-autotune", EMULATED, INDUCTOR, EMULATED, EMULATED, EMULATED),
    (DENSE, (16, 4096, 4096), "tensor", "at most 16", SMALL_M, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4096), "tensor", "cpp", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4096), "tensor dgrad", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, INDUCTOR),
    (DENSE, (16, 4096, 4096), "tensor", "max-autotune", SMALL_M, INDUCTOR, INDUCTOR, INDUCTOR, INDUCTOR),
    (GROUPED, (8192, 2048, 4096), "tensor", "", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "row", "", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "blocks", "", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "mxfp8", "", EMULATED, LIBRARY, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "nvfp4", "", EMULATED, LIBRARY, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "mxfp4", "", EMULATED, LIBRARY, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "mxfp6", "", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "row", "leaves", LIBRARY, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "row", "fp32 weights", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "row", "fp32", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (GROUPED, (8192, 2048, 4096), "mxfp8", "leaves", EMULATED, LIBRARY, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "mxfp8", "fp32 weights", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "mxfp8", "fp32", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "nvfp4", "leaves", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "nvfp4", "fp32 weights", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (GROUPED, (8192, 2048, 4096), "nvfp4", "fp32", EMULATED, EMULATED, EMULATED, EMULATED, EMULATED),
    (STORED, (1, 4096, 4096), "nvfp4", "", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (64, 4096, 4096), "nvfp4", "", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (65, 4096, 4096), "nvfp4", "", PROMPT, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (128, 4096, 4096), "nvfp4", "", PROMPT, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (129, 4096, 4096), "nvfp4", "", PROMPT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (512, 4096, 4096), "nvfp4", "", PROMPT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (513, 4096, 4096), "nvfp4", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (64, 4096, 4160), "nvfp4", "", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (65, 4096, 4160), "nvfp4", "", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (129, 4096, 4160), "nvfp4", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (64, 4096, 4096), "nvfp4", "bf16 prefill", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (64, 4096, 4096), "nvfp4", "fp32 rows", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (128, 4096, 4096), "nvfp4", "bf16 prefill", NVFP4, NVFP4, EAGER, NVFP4, EAGER),
    (STORED, (128, 4096, 4096), "nvfp4", "fp32 rows", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (129, 4096, 4096), "nvfp4", "bf16 prefill", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (129, 4096, 4096), "nvfp4", "fp32 rows", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED, (64, 4096, 4096), "nvfp4", "symbolic", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (1, 2048, 4096), "stored nvfp4", "", DECODE, DECODE, CUBLASLT, DECODE, EAGER),
    (STORED_EXPERTS, (1, 2048, 4096), "tensor", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (1, 2048, 4096), "row", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (1, 2048, 4096), "blocks", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (512, 2048, 4096), "stored nvfp4", "", DECODE, DECODE, CUBLASLT, DECODE, EAGER),
    (STORED_EXPERTS, (512, 2048, 4096), "tensor", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (512, 2048, 4096), "row", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (512, 2048, 4096), "blocks", "", DECODE, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (513, 2048, 4096), "stored nvfp4", "", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (513, 2048, 4096), "tensor", "", GROUPED_MM, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (513, 2048, 4096), "row", "", GROUPED_MM, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (513, 2048, 4096), "blocks", "", GROUPED_MM, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (16, 2048, 4096), "stored nvfp4", "symbolic", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (16, 2048, 4096), "stored nvfp4", "fp32 rows", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (16, 2048, 4096), "row", "symbolic", GROUPED_MM, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (16, 2048, 4096), "row", "fp32 rows", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
    (STORED_EXPERTS, (4096, 2048, 4096), "stored nvfp4", "symbolic", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (4096, 2048, 4096), "stored nvfp4", "fp32 rows", CUBLASLT, CUBLASLT, CUBLASLT, CUBLASLT, EAGER),
    (STORED_EXPERTS, (4096, 2048, 4096), "row", "symbolic", GROUPED_MM, DECODE, DECODE, DECODE, EAGER),
    (STORED_EXPERTS, (4096, 2048, 4096), "row", "fp32 rows", GROUPED_MM, EAGER, EAGER, EAGER, EAGER),
]  # fmt: skip


def problem(form: str, sizes: tuple[int, int, int], gemm: str, more: str, target) -> Problem:
    m, n, k = sizes
    most = 16 if more == "at most 16" else None if more == "symbolic" else fp8_small_m.at_most(lambda rows: m <= rows)
    experts = EXPERTS if form in (GROUPED, STORED_EXPERTS) else None
    rows = FP32 if more == "fp32 rows" else BF16
    nvfp4 = gemm in ("nvfp4", "stored nvfp4")
    return Problem(
        target,
        Sizes(None if more in ("symbolic", "at most 16") else m, n, k, experts, most),
        GEMMS["stored nvfp4" if form == STORED else gemm],
        OUT.get(more, BF16),
        EPILOGUES.get(more, Epilogue()),
        PROGRAMS.get(more, Program()),
        Stored("e2m1" if nvfp4 else "e4m3", rows, more != "bf16 prefill") if form in (STORED, STORED_EXPERTS) else None,
        FP32 if more == "fp32 weights" else None,
    )


@pytest.mark.parametrize("place", range(len(DEVICES)), ids=[target.name for target in DEVICES])
def test_choices(place, monkeypatch):
    monkeypatch.setattr("te_inductor.kernels.cutlass_packages.missing", lambda: None)
    for *asked, _, _, _, _, _ in CHOICES:
        expected = next(row[4:] for row in CHOICES if row[:4] == tuple(asked))[place]
        choice = select(problem(*asked, DEVICES[place]))
        assert choice.name == expected, (asked, DEVICES[place].name)
        assert (choice.kernel is not None) == (choice.family is cutlass.FAMILY)


@pytest.mark.parametrize("held", [BF16, FP32])
def test_gradients_of_weights_are_in_their_dtype(held, monkeypatch):
    """Weights in fp32 have such gradients under autocast, too, and CUTLASS's kernels write fp32 only where they add."""
    monkeypatch.setattr("te_inductor.kernels.cutlass_packages.missing", lambda: None)
    x = torch.zeros(8192, 4096, dtype=held, requires_grad=True)
    with torch.autocast("cpu", BF16):
        layer = torch.nn.Linear(4096, 4096, dtype=held)
        sites = te_inductor.explain(layer, x, options={"recipe": "current"}, target="h200").sites
    kernels = {site.gemm: site.kernel.partition(":")[0] for site in sites}
    assert kernels == {"fprop": "cutlass", "dgrad": "cutlass", "wgrad": "cutlass" if held == BF16 else "cublaslt"}


def test_every_problem_has_a_kernel_and_every_family_a_problem():
    """`select` never ends without an answer, and a family that is never chosen is none."""
    found = {select(problem(*row[:4], target)).family for row in CHOICES for target in DEVICES}
    missing = [family.name for family in FAMILIES if family not in found]
    assert missing in ([], ["cutlass"])  # where its packages are not installed


def test_one_folder_asks_which_kernels_a_device_runs():
    """What else asks `kernels` has no list of families."""
    capabilities = {"microscaled_mm", "grouped_microscaled_mm"}
    abilities = {"GROUPED_KERNELS", "HOPPER_KERNELS", "NVFP4_KERNELS"}
    asking = {
        path.partition("/")[0]
        for path, node in nodes(ast.Attribute)
        if (node.attr in capabilities and "target" in ast.unparse(node.value))
        or (node.attr in abilities and not path.startswith("targets/"))
    }
    assert asking == {"kernels"}


def test_no_limit_stands_beside_targets():
    """The multiprocessors and the shared memory of a device are facts of `targets`."""
    numbers = {132, 227 * 2**10, 227, 113}
    found = {
        f"{path}: {node.value}"
        for path, node in nodes(ast.Constant, "kernels", "templates", "lowerings", "fused", "runtime", "ops")
        if type(node.value) is int and node.value in numbers
    }
    assert not found
