"""Prompts by a weight that is stored in NVFP4 and decoded to E4M3 between its products, on Hopper:
templates/triton/nvfp4_fp8.py. How it cuts the work says a model of its time."""

import functools

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels import nvfp4_linear
from te_inductor.kernels.family import Choice, KernelFamily
from te_inductor.kernels.problem import STORED, Problem, Sizes
from te_inductor.recipes.constants import Constant, constant
from te_inductor.targets import Ability, Limits, Target, sm90

PROMPT_ROWS = 512  # of x, at most
BLOCK_N = 128  # rows of the weight in a program
# Fitted to what was measured on an H200 (docs/ledger.md). Microseconds of a turn and of all else in a program, by
# its rows of x; where K is split, of what writes and adds sums besides: 4 bytes an element and split, and as if of 6
# more, so many a microsecond.
_TURN = {128: (1.2, 4.2), 160: (1.27, 4.6), 192: (1.34, 5.0), 256: (1.48, 5.8)}
_SPLIT, _SUMMED = 1.0, 4e6
SPLITS = 8  # at most


@constant
class NVFP4PromptConfig(Constant):
    """How the work is cut."""

    rows: int  # of x in one program, of _TURN
    splits: int  # programs that share the K of one tile, of which some may have a turn more than others

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.splits} splits"


@functools.lru_cache(1024)  # also eager layers ask, at each call
def configured(m: int, n: int, k: int, limits: Limits = sm90.LIMITS) -> NVFP4PromptConfig:
    """What should be fastest, K being a multiple of 256."""
    most = min(SPLITS, k // nvfp4_linear.PROMPT_COLUMNS)
    configs = (NVFP4PromptConfig(rows, splits) for rows in _TURN for splits in range(1, most + 1))
    return min(configs, key=lambda config: microseconds(config, m, n, k, limits))


def microseconds(config: NVFP4PromptConfig, m: int, n: int, k: int, limits: Limits = sm90.LIMITS) -> float:
    """About as long as it takes, sums and all."""
    turn, rest = _TURN[config.rows]
    programs = -(-m // config.rows) * -(-n // BLOCK_N) * config.splits
    waves = -(-programs // limits.multiprocessors)
    sums = _SPLIT + (4 * config.splits + 6) * m * n / _SUMMED if config.splits > 1 else 0.0
    turns = -(-k // (nvfp4_linear.PROMPT_COLUMNS * config.splits))
    return waves * (turn * turns + rest) + sums


def runs(target: Target) -> bool:
    """Whether a device runs the kernel."""
    return Ability.HOPPER_KERNELS in target.can


def _supports(problem: Problem) -> Refusal | None:
    m = problem.sizes.m
    if problem.program.leaves or not nvfp4_linear.decodes(problem):
        return Refusal("%s does not decode the weight as it multiplies", problem.target.name)
    # What a symbol stands for is asked when it runs, by the op: a third graph would be one too many.
    if m is None or not (isinstance(m, torch.SymInt) or m <= PROMPT_ROWS):
        return Refusal("more rows than %d, or not known how many", PROMPT_ROWS)
    return nvfp4_linear.refuses_rows(problem)


def _measured(problem: Problem) -> Choice:
    sizes: Sizes = problem.sizes
    if not sizes.known:
        return Choice(FAMILY)
    return Choice(FAMILY, configured(sizes.m, sizes.n, sizes.k, problem.target.limits))


FAMILY = KernelFamily("triton:nvfp4_fp8", (STORED,), _supports, _measured)
