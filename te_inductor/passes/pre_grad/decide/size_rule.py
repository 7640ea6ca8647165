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

Experts are weighed by what whole layers of them took (H100, 16384 tokens, 2026-11-25; docs/performance.md): with 8
experts of 14336 casts are little; with 128 of 768 the weights of all experts are cast for the work of a few tokens each,
and what the casts cost was, with current scaling, rows or blocks, 4 bytes an element of all operands at the speed of
memory. There the saving has to be above that. Experts narrower than `NARROW_EXPERTS` have not been measured.

Layers that are sharded over several GPUs (tensor parallelism) are weighed by what one rank multiplies. Llama-8B's on two
H200s, all of which pass, took 0.73 times as long as in bf16 (2026-11-26).

The rest holds for targets with measured `rates`. Where the number of rows is a symbol, layers are weighed by the size of
their weights alone, and experts by the number that was seen first. A policy entry that names a site overrides it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.match.rule import Match

MARGIN = 1.4
NARROW = 1536
NARROW_EXPERTS = 768


def refusal(matches: Sequence[Match]) -> Refusal | None:
    """Why sites of one input are better left alone; None where they pay or nothing is known."""
    match = matches[0]
    device = value(match.weight).device
    m, _, k = match.sizes
    n = sum(match.sizes[1] for match in matches)
    rates = targets.of(device).rates
    if rates is None:
        return None
    narrow = NARROW_EXPERTS if match.groups else NARROW
    if min(n, k) < narrow:
        return Refusal(
            "too small for FP8 to pay: M=%s, N=%d, K=%d, where less than %d is narrow (a policy entry overrides this)",
            *(m, n, k, narrow),
        )
    # All experts' weights are cast however few rows there are, so a symbol counts as what it was first.
    rows = m.node.hint if match.groups and isinstance(m, torch.SymInt) else m
    if not isinstance(rows, int):
        return None
    weight = weigh(matches, rates, rows)
    margin = 1.0 if match.groups else MARGIN
    if weight.saved >= margin * weight.cost:
        return None
    return Refusal(
        "too small for FP8 to pay: M=%d, N=%d, K=%d, it would save %.0f us and cost %.0f us, where it has to save %.1f"
        " times as much (a policy entry overrides this)",
        *(rows, n, k, 1e6 * weight.saved, 1e6 * weight.cost, margin),
    )


class Weight(NamedTuple):
    """Seconds."""

    high: float  # of the GEMMs in bf16
    saved: float  # of those by FP8
    cost: float  # of the casts


def weigh(matches: Sequence[Match], rates: targets.Rates, m: int) -> Weight:
    """What FP8 saves and costs sites of one input of `m` rows."""
    match = matches[0]
    k = match.sizes[2]
    n = sum(each.sizes[1] for each in matches)
    gemms = len(list(match.gemms()))
    flops, training = 2 * gemms * m * n * k, gemms > 1
    moved = _bytes_of_experts(m, n, k, match.experts, training) if match.groups else _bytes(m, n, k, training)
    cost = moved / rates.bytes + _kernels(training) * rates.launch
    return Weight(flops / rates.bf16_flops, flops * (1 / rates.bf16_flops - 1 / rates.fp8_flops), cost)


def _bytes(m: int, n: int, k: int, training: bool) -> int:
    """Read bf16, once more to find the scale; write a row copy and, in training, a column copy."""
    elements = m * k + n * k + (m * n if training else 0)
    return elements * (4 + (2 if training else 1))


def _bytes_of_experts(m: int, n: int, k: int, experts: int, training: bool) -> int:
    """As measured; without a backward read bf16, write FP8."""
    read = m * k + experts * n * k
    return 4 * (read + m * n) if training else 3 * read


def _kernels(training: bool) -> int:
    """A cast a tensor, and an amax in two stages before it."""
    return 3 * (3 if training else 2)
