"""The devices, and problems on them, for tests of which kernel is chosen."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from te_inductor import targets
from te_inductor.kernels import nvfp4_linear
from te_inductor.kernels.problem import Epilogue, Problem, Sizes
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128
from te_inductor.targets import Ability, Limits, Target, cpu, sm89, sm90, sm100, sm120

CUDA = "13.0"
CPU = cpu.TARGET
H200 = replace(sm90.target((9, 0), CUDA), product="NVIDIA H200", limits=sm90.LIMITS)
B200 = replace(
    sm100.target((10, 0), CUDA),
    product="NVIDIA B200",
    limits=Limits(148, 227 * 2**10, 126 * 2**20),
    grouped_microscaled_mm=sm100.GROUPS,  # whichever torch runs the tests
)
L40S = replace(sm89.target((8, 9), CUDA), product="NVIDIA L40S", limits=Limits(142, 99 * 2**10, 96 * 2**20))
RTX5090 = replace(
    sm120.target((12, 0), CUDA), product="NVIDIA GeForce RTX 5090", limits=Limits(170, 99 * 2**10, 96 * 2**20)
)
BF16 = torch.bfloat16


def pretend(monkeypatch: Any, capability: tuple[int, int], product: str = H200.product) -> None:
    """Have the package take CUDA devices for one of this capability, and of this name."""
    properties = SimpleNamespace(
        name=product,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        shared_memory_per_block_optin=227 * 2**10,
        L2_cache_size=50 * 2**20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: product)
    monkeypatch.setattr(targets, "_known", {})


def dense(
    m: int,
    n: int,
    k: int,
    scope: str = "tensor",  # of b, and of a, where they differ a has blocks of one row
    fast_accum: bool = True,
    elements: tuple[str, str] = ("e4m3", "e4m3"),
    out: torch.dtype = BF16,
    target: Target = H200,
    **epilogue: Any,
) -> Problem:
    """The product of a matrix and one that is cast."""
    scopes = (BLOCK_1X128.name if scope == BLOCK_128X128.name else scope, scope)
    return Problem(target, Sizes(m, n, k), Gemm("fprop", fast_accum, scopes, elements), out, Epilogue(**epilogue))


def stored(m: int, n: int, k: int, rows: torch.dtype = BF16, hopper: bool = True) -> Problem:
    """The product of rows and a weight that is stored in NVFP4."""
    target = H200 if hopper else replace(H200, can=H200.can & ~Ability.HOPPER_KERNELS)
    return nvfp4_linear.problem(target, Sizes(m, n, k), rows, rows)
