"""Which sites would be slower in low precision: small ones, and those of few tokens, whose weights are cast for little
work.

# Note [Size rule]
FP8 halves the time of a site's GEMMs and adds casts of their operands: bytes to move, kernels to launch. The rule
compares the two, for the sites of one input together, with figures measured on an H200 (torch 2.11.0+cu130, 2026-11-20;
the table "Where padding and small sizes stop to pay" of docs/performance.md). It errs towards high precision, since
whole models of small layers were slower than their layers alone: SmolLM-360M (hidden size 960, 16384 tokens, H100) took
1.12 times as long as bf16 under delayed scaling, for which the saving of every layer was above its cost, and BERT-large
(1024) 1.01 times under current. So

- the saving has to be `MARGIN` times the cost;
- the cost is that of current scaling under every recipe: delayed scaling, which moves fewer bytes, was slower there;
- both sizes of the weight have to be `NARROW` or more. Each is the length that one of the GEMMs adds up, and an FP8
  GEMM of a short one spends its time on what does not depend on the format: filling its pipeline, writing its output.

Experts are left alone there until a whole layer of them has been measured: their GEMMs alone say little, as casts of all
experts' weights may take as long as the GEMMs save.

It holds for targets with measured `rates`; where the number of rows is a symbol, the last part alone. A policy entry that
names a site overrides it."""

from collections.abc import Sequence
from typing import NamedTuple

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.match.rule import Match

MARGIN = 1.4
NARROW = 1536


def refusal(matches: Sequence[Match]) -> Refusal | None:
    """Why sites of one input are better left alone; None where they pay or nothing is known."""
    match = matches[0]
    device = value(match.weight).device
    m, _, k = match.sizes
    n = sum(match.sizes[1] for match in matches)
    rates = targets.of(device).rates
    if rates is None:
        return None
    if match.groups:
        return Refusal(
            "whether experts in FP8 pay has not been measured on a GPU yet: M=%s, N=%d, K=%d (a policy entry overrides"
            " this)",
            *(m, n, k),
        )
    if min(n, k) < NARROW:
        return Refusal(
            "too small for FP8 to pay: M=%s, N=%d, K=%d, where less than %d is narrow (a policy entry overrides this)",
            *(m, n, k, NARROW),
        )
    if not isinstance(m, int):
        return None
    weight = weigh(matches, rates)
    if weight.saved >= MARGIN * weight.cost:
        return None
    return Refusal(
        "too small for FP8 to pay: M=%d, N=%d, K=%d, it would save %.0f us and cost %.0f us, where it has to save %.1f"
        " times as much (a policy entry overrides this)",
        *(m, n, k, 1e6 * weight.saved, 1e6 * weight.cost, MARGIN),
    )


class Weight(NamedTuple):
    """Seconds."""

    high: float  # of the GEMMs in bf16
    saved: float  # of those by FP8
    cost: float  # of the casts


def weigh(matches: Sequence[Match], rates: targets.Rates) -> Weight:
    """What FP8 saves and costs sites of one input, whose sizes are numbers."""
    m, _, k = matches[0].sizes
    n = sum(match.sizes[1] for match in matches)
    gemms = len(list(matches[0].gemms()))
    flops, training = 2 * gemms * m * n * k, gemms > 1
    cost = _bytes(m, n, k, training) / rates.bytes + _kernels(training) * rates.launch
    return Weight(flops / rates.bf16_flops, flops * (1 / rates.bf16_flops - 1 / rates.fp8_flops), cost)


def _bytes(m: int, n: int, k: int, training: bool) -> int:
    """Read bf16, once more to find the scale; write a row copy and, in training, a column copy."""
    elements = m * k + n * k + (m * n if training else 0)
    return elements * (4 + (2 if training else 1))


def _kernels(training: bool) -> int:
    """A cast a tensor, and an amax in two stages before it."""
    return 3 * (3 if training else 2)
