"""Which sites would be slower in low precision: small ones, and those of few tokens, whose weights are cast for little work.

# Note [Size rule]
FP8 halves the time of a site's GEMMs and adds casts of their operands: bytes to move, kernels to launch. The rule compares
the two, for the sites of one input together, with figures measured on an H200 (torch 2.11.0+cu130, 2026-11-20; the table
"Where padding and small sizes stop to pay" of docs/performance.md, whose square layers and those of N >= 1000 it puts on the
right side of 1). Casts that fuse with their producers, and layers so narrow that bf16 is slow as well, are faster than the
rule thinks: it errs towards high precision.

It holds for compute capability 9.0 and sizes that are known; a policy entry that names a site overrides it.
"""

from collections.abc import Sequence

from te_inductor.compat import capability_of
from te_inductor.diagnostics import Refusal
from te_inductor.patterns.rule import Match
from te_inductor.patterns.support import value
from te_inductor.recipes import DelayedScaling, Recipe

CAPABILITY = (9, 0)
BF16_FLOPS = 650e12  # per second
FP8_FLOPS = 1250e12
BYTES = 2.6e12  # per second, of casts that stand alone
LAUNCH = 2.2e-6  # seconds that a kernel more costs


def refusal(matches: Sequence[Match], recipe: Recipe) -> Refusal | None:
    """Why sites of one input are better left alone; None where they pay or nothing is known."""
    match = matches[0]
    device = value(match.weight).device
    m, _, k = match.sizes
    n = sum(match.sizes[1] for match in matches)
    if device.type != "cuda" or not isinstance(m, int) or capability_of(device) != CAPABILITY:
        return None
    gemms = len(list(match.gemms()))
    saved = 2 * gemms * m * n * k * (1 / BF16_FLOPS - 1 / FP8_FLOPS)
    cost = _bytes(m, n, k, gemms > 1, recipe) / BYTES + _kernels(gemms > 1, recipe) * LAUNCH
    if saved >= cost:
        return None
    return Refusal(
        "too small for FP8 to pay: M=%d, N=%d, K=%d, it would save %.0f us and cost %.0f us (a policy entry overrides this)",
        *(m, n, k, 1e6 * saved, 1e6 * cost),
    )


def _bytes(m: int, n: int, k: int, training: bool, recipe: Recipe) -> int:
    """Read bf16, once more where the scale has to be found first; write a row copy and, in training, a column copy."""
    reads = 2 if isinstance(recipe, DelayedScaling) else 4
    elements = m * k + n * k + (m * n if training else 0)
    return elements * (reads + (2 if training else 1))


def _kernels(training: bool, recipe: Recipe) -> int:
    """One cast a tensor; an amax in two stages before it where the scale has to be found first."""
    return (3 if training else 2) * (1 if isinstance(recipe, DelayedScaling) else 3)
