"""What a family of kernels says of itself, and what is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.problem import Problem
from te_inductor.numerics.scaled_products import Matrices, ScaledProduct


@dataclass(frozen=True)
class Choice:
    """The kernel that runs a problem: what reports name, lowerings emit and early builds build."""

    family: "KernelFamily"
    config: Any = None  # how the work is cut: of the family's own kind
    kernel: Any = None  # of CUTLASS, a `cutlass_tiles.Kernel`, which has to be built

    @property
    def name(self) -> str:
        """The name, as `Site.kernel` has it."""
        return self.family.name if self.kernel is None else f"{self.family.name}:{self.config}"


@dataclass(frozen=True, eq=False)
class KernelFamily:
    """Kernels that are written, or generated, in one way."""

    name: str  # as reports have it
    forms: tuple[str, ...]  # of problems, of which it is asked
    supports: Callable[[Problem], Refusal | None]  # why it does not compute a problem
    # The choice where the family's cost model or measured table says that it pays; left out: it always does.
    measured: Callable[[Problem], Choice | None] | None = None
    written: Callable[[Matrices, ScaledProduct], Any] | None = None  # of dense products, where no library has them

    def choice(self, problem: Problem) -> Choice | None:
        """How it runs a problem; None where it does not, or another family is faster."""
        if problem.form not in self.forms or self.supports(problem) is not None:
            return None
        return Choice(self) if self.measured is None else self.measured(problem)
