"""The choice of the kernel that runs a GEMM. Everybody asks here: the report and the early builds before autograd,
passes that give a GEMM more to do, lowerings, and what decides by a kernel's presence. So all of them answer the same.

A `Problem` says what is computed, and on which device; `select` answers with a `Choice`. What is asked of a problem
before its sizes are known leaves them None.
"""

from dataclasses import dataclass
from typing import Any

import torch

from te_inductor import targets
from te_inductor.numerics.activation import Activation, Gating
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128
from te_inductor.runtime.eager import grouped
from te_inductor.runtime.eager.dense import BLOCK_SCALES
from te_inductor.templates import grouped_library, small_m
from te_inductor.templates.cutlass import scaled_mm as cutlass
from te_inductor.templates.cutlass import tables
from te_inductor.templates.cutlass.scaled_mm import NOTHING, Kernel, Tile

# Kinds of a `Choice`.
EXACT = "inductor"  # generated code multiplies in fp32 what the operands hold
AUTOTUNED = "autotuned"  # what Inductor measures to be fastest
EMULATED = "emulated"  # generated code multiplies in high precision what MXFP8 or NVFP4 operands hold
GROUPED = "triton:grouped_mm"  # templates/triton/grouped_mm.py
GROUPED_LIBRARY = "cutlass:_scaled_grouped_mm"  # torch's: templates/grouped_library.py; in packages of FP8 too
EAGER = "eager"  # the op's eager kernel
SMALL_M = "triton:fp8_small_m"  # templates/triton/fp8_small_m.py
CUTLASS = "cutlass"
LIBRARY = "cublaslt"


@dataclass(frozen=True)
class Problem:
    """``out[M, N] = a[M, K] @ b[N, K].T`` of low-precision operands, and what is done with it before it is stored. A
    size is None where it is not known when the kernel is chosen."""

    device: torch.device
    m: int | None
    n: int | None
    k: int | None  # values, of which two may be a byte
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    gemm: Gemm
    bias: bool = False
    at_most: int | None = None  # of `small_m.ROWS`, the least that M is known not to exceed
    added: str = NOTHING  # what is added to the product: a key of `templates.cutlass.scaled_mm.OUTPUTS`
    activation: Activation | None = None  # computed of the sum, and cast to `out`
    gating: Gating | None = None  # likewise, and cast both ways
    autotunes: bool = False  # the user asked for max-autotune
    cpp_wrapper: bool = False  # generated code is C++, which calls no kernels of ours
    grouped: bool = False  # a product for each group of rows, or of columns that are summed over
    held: torch.dtype | None = None  # of the weights of a grouped product, where that is not `out`
    leaves: bool = False  # part of a program that leaves this process, as packages of AOTInductor do

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a bias is added to the product."""
        return self.added == NOTHING and self.activation is None and self.gating is None

    @property
    def sizes(self) -> tuple[int | None, int | None, int | None]:
        return self.m, self.n, self.k


@dataclass(frozen=True)
class Choice:
    """The kernel that runs a problem."""

    kind: str
    tile: Tile | None = None  # of CUTLASS
    kernel: Kernel | None = None  # of CUTLASS, which has to be built for it
    cut: small_m.Config | None = None  # of SMALL_M

    @property
    def name(self) -> str:
        """The name as `Site.kernel` has it."""
        if self.kind == AUTOTUNED:
            return "inductor"
        return self.kind if self.tile is None else f"{self.kind}:{self.tile}"


def select(problem: Problem) -> Choice:
    """The kernel for a problem. Only a `CUTLASS` choice adds, computes an activation or casts in its epilogue; for a
    problem that is not plain any other says that there is no such kernel, or that it does not pay."""
    target, gemm = targets.of(problem.device), problem.gemm
    if problem.grouped:
        if grouped_library.multiplies(
            problem.device, gemm, problem.out, problem.held or problem.out, leaves=problem.leaves
        ):
            return Choice(GROUPED_LIBRARY)
        if not grouped.has_kernel(problem.device, gemm):
            return Choice(EMULATED if gemm.microscaled else EAGER)
        return Choice(GROUPED_LIBRARY if problem.leaves else GROUPED)
    if gemm.microscaled:
        if not target.multiplies(gemm):
            return Choice(EMULATED)
    elif not (target.block_scaled_mm if gemm.blocked else target.fp8):
        return Choice(EXACT)
    cut = _cut(problem)
    if cut is not None:
        return Choice(SMALL_M, cut=cut)
    # fp32 scales of blocks nothing but cuBLASLt is right for; what adds in place would add as often as it is measured.
    measured = problem.autotunes and (not gemm.blocked or (gemm.microscaled and _arch(problem) is not None))
    if measured and problem.is_plain:
        return Choice(AUTOTUNED)
    given = cutlass_problem(problem)
    tile = None if given is None else tables.choose(given, targets.product(problem.device))
    if given is None or tile is None:
        return Choice(AUTOTUNED if measured else LIBRARY)
    return Choice(CUTLASS, tile, given.kernel(tile))


def _cut(problem: Problem) -> small_m.Config | None:
    """How the kernel for few rows of `a` cuts the work, where there is one. Under max-autotune too: it is near what
    memory allows."""
    if not problem.is_plain or problem.cpp_wrapper:
        return None
    dtypes = problem.a, problem.b
    return small_m.choose(problem.device, problem.at_most, (problem.n, problem.k), dtypes, problem.gemm)


def cutlass_problem(problem: Problem) -> cutlass.Problem | None:
    """What it is for CUTLASS; None where there are no kernels for it, or a size is not known."""
    arch, k = _arch(problem), problem.k
    scope = None if k is None else scope_of(problem.gemm, k)
    if arch is None or scope is None or problem.m is None or problem.n is None or k is None:
        return None
    dtypes = (
        [element.library for element in problem.gemm.formats] if problem.gemm.microscaled else [problem.a, problem.b]
    )
    kind: Any = (problem.bias, problem.gemm.fast_accum, problem.added, problem.activation, problem.gating)
    return cutlass.Problem(arch, problem.m, problem.n, k, dtypes[0], dtypes[1], problem.out, scope, *kind)


def _arch(problem: Problem) -> str | None:
    return None if problem.cpp_wrapper else cutlass.architecture(problem.device)


def scope_of(gemm: Gemm, k: int) -> str | None:
    """What has one scale in CUTLASS's GEMM of K elements; None where it has no kernel: square blocks on the left, scales
    of one block."""
    a, b = gemm.granularities
    if not gemm.blocked:
        return a.name
    if gemm.microscaled:  # square blocks are spread to rows' for the tensor core
        return f"1x{a.block[1]}"
    blocks = -(-k // a.alignment)
    if not a.one_row or blocks == 1:
        return None
    return BLOCK_1X128.name if blocks % BLOCK_SCALES else b.name  # as `eager._block_operand` spreads them
