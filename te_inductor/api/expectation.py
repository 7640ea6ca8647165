"""What a call on a device elsewhere is expected to take: sums of what the size rule and the memory rule know of graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from te_inductor import targets
from te_inductor.kernels import cutlass_packages
from te_inductor.passes.pre_grad.decide import memory_rule
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.sites.products import hint
from te_inductor.presentation.report import Expected, Report


@dataclass
class GraphMemory:
    """What the parameters of a graph take, and what low precision changes at the peak of its step."""

    parameters: dict[int, nn.Parameter]  # by identity: graphs share some
    peak_bytes: int | None


def memory_of(plan: Plan) -> GraphMemory:
    """Returns the memory of a graph that was decided about."""
    held = {id(one): one for one in plan.inputs if isinstance(one, nn.Parameter)}
    known = all(hint(site.match.sizes[0]) is not None for site in plan.candidates)
    return GraphMemory(held, round(memory_rule.balance(plan)) if known else None)


def expected_of(there: targets.Target, report: Report, memory: Sequence[GraphMemory]) -> Expected:
    """Sums up what graphs are expected to take, those that were weighed."""
    bf16_s, step_s, rates = 0.0, 0.0, targets.rates_in(there)
    by_host = False
    for graph in report.weights:
        launches = sum(one.weight.launches for one in graph.layers if one.low)
        host = graph.host_s or 0.0
        bf16_s += max(graph.device_s, host - launches * (rates.host_launch if rates else 0.0))
        step_s += max(graph.device_s - graph.gain_s, host)
        by_host |= host > graph.device_s - graph.gain_s
    parameters = {key: one for each in memory for key, one in each.parameters.items()}.values()
    peaks = [each.peak_bytes for each in memory if each.peak_bytes is not None]
    return Expected(
        there.product,
        " and ".join(dict.fromkeys(graph.rates for graph in report.weights)) or None,
        bf16_s if report.weights else None,
        step_s if report.weights else None,
        by_host,
        sum(one.nbytes for one in parameters),
        sum(one.nbytes for one in parameters if one.requires_grad and torch.is_grad_enabled()),
        sum(peaks) if len(peaks) == len(memory) else None,
        None if there.cutlass is None else cutlass_packages.missing(),
    )
