"""CUTLASS's GEMMs, templates/cutlass/, in the tile that was measured to be faster than cuBLASLt: cutlass_tables.py."""

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import cublaslt, cutlass_tables, cutlass_tiles
from te_inductor.kernels.family import Choice, KernelFamily
from te_inductor.kernels.problem import DENSE, Problem


def computes(problem: Problem) -> Refusal | None:
    """Why there is no kernel for it, whichever is fastest."""
    if cutlass_tiles.architecture(problem) is None:
        return Refusal("no CUTLASS kernels on %s, or for generated C++", problem.target.name)
    if not problem.sizes.known:
        return Refusal("a size is not known")
    if cutlass_tiles.scope_of(problem) is None:
        return Refusal("no CUTLASS kernel with scales of %s and %s", *problem.gemm.scopes)
    return None


def _supports(problem: Problem) -> Refusal | None:
    # What adds in place would add as often as it is measured, and measuring does not see what an epilogue saves.
    if problem.epilogue.is_plain and cublaslt.autotunes(problem) is None:
        return Refusal("max-autotune measures its tiles as well")
    return cublaslt.multiplies(problem) or computes(problem)


def _measured(problem: Problem) -> Choice | None:
    tile = cutlass_tables.choose(problem)
    return None if tile is None else Choice(FAMILY, tile, cutlass_tiles.kernel(problem, tile))


FAMILY = KernelFamily("cutlass", (DENSE,), _supports, _measured)
