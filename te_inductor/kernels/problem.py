"""What a product of low-precision operands computes, as far as the choice of its kernel depends on it.

The fields are records of one meaning each: the device, sizes, operands, and what is done with the product."""

from dataclasses import dataclass
from typing import Any

import torch

from te_inductor.numerics.activation import Activation, Gating
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import E2M1
from te_inductor.targets import Target

# What an epilogue adds to the product: nothing; what the output held, in place; another tensor like it.
NOTHING, OUTPUT, ANOTHER = "nothing", "output", "another"
# What is multiplied: a matrix by one that is cast; groups of rows, each by a matrix of its own, or of columns that are
# summed over; rows in high precision by a weight that is stored in NVFP4; groups of such rows by stored matrices.
DENSE, GROUPED, STORED, STORED_EXPERTS = "dense", "grouped", "stored", "stored experts"


@dataclass(frozen=True)
class Sizes:
    """``out[M, N] = a[M, K] @ b[N, K].T``: numbers, or None where one is not known when the kernel is chosen."""

    # M of a layer that is traced may be a `torch.SymInt`: then what is asked of it becomes a guard.
    m: Any
    n: Any
    k: Any  # values, of which several may be a byte
    experts: int | None = None  # of a product for each group, how many there are; 0: it is not known
    at_most: int | None = None  # of `fp8_small_m.ROWS`, the least that M is known not to exceed

    @property
    def known(self) -> bool:
        """Whether M, N and K are numbers."""
        return all(isinstance(size, int) for size in (self.m, self.n, self.k))


@dataclass(frozen=True)
class Epilogue:
    """What is done with the product before it is stored."""

    bias: bool = False
    added: str = NOTHING
    activation: Activation | None = None  # computed of the sum, and cast to FP8
    gating: Gating | None = None  # likewise, and cast both ways

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a bias is added."""
        return self.added == NOTHING and self.activation is None and self.gating is None


@dataclass(frozen=True)
class Program:
    """What the product is part of."""

    autotunes: bool = False  # the user asked for max-autotune
    cpp_wrapper: bool = False  # generated code is C++, which calls no kernels of ours
    leaves: bool = False  # it leaves this process, as packages of AOTInductor do


@dataclass(frozen=True)
class Stored:
    """A weight that was stored in low precision, and the rows that meet it."""

    element: str  # of the weight
    rows: torch.dtype  # of activations, before any cast
    casts_rows: bool = True  # whether the recipe lets many of them be cast to FP8


@dataclass(frozen=True)
class Problem:
    """``out[M, N] = (a * a_scale)[M, K] @ (b * b_scale)[N, K].T``, and what is done with it."""

    target: Target
    sizes: Sizes
    gemm: Gemm  # elements and scales of both operands; of a stored weight where rows are cast as well
    out: torch.dtype
    epilogue: Epilogue = Epilogue()
    program: Program = Program()
    stored: Stored | None = None
    held: torch.dtype | None = None  # of a grouped product's weights before their cast, where that is not `out`

    @property
    def form(self) -> str:
        if self.sizes.experts is None:
            # An FP8 weight that is stored is multiplied as one that is cast.
            return DENSE if self.stored is None else STORED
        return GROUPED if self.stored is None else STORED_EXPERTS

    @property
    def is_nvfp4(self) -> bool:
        """Whether its weight is stored in NVFP4."""
        return self.stored is not None and self.stored.element == E2M1.name
