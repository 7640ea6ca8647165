"""The sites that would be slower in low precision: those of small graphs, of few tokens, and small ones of a large
graph.

# Note [Size rule]
FP8 halves what a GEMM's arithmetic takes and adds casts of its operands: bytes to move, kernels to launch. The rule sums
both over a graph, by the rates of the device (targets/sm90.py):

1. Layers of one input save ``FLOPs (1 / bf16's rate - 1 / FP8's)`` and cost what their casts move and launch
   (cast_costs.py). Those whose saving is not `MARGIN` times their cost stay in high precision.
2. The others run in FP8 if together they gain, saving less cost, at least `SHARE` of what the GEMMs of the graph's layers
   take in bf16. Otherwise the whole graph stays as it is, and is plain Inductor's.
3. Where Python launches each kernel, the host has to keep up with the device. A graph gains no more than what is
   between the device's time in bf16 and the host's time in FP8. CUDA graphs that torch records, and C++ wrappers, have
   no such limit.

The device's time in bf16 is that of all matrix products, and of moving what else the graph makes: twice its bytes in
training, once in inference. Attention is not in it, so the rule errs towards high precision. The host launches two
kernels a GEMM (two Llama blocks: 87, of which 42 are GEMMs), and those of the casts. Under FSDP2 it runs hooks, too, for
each parameter: of four Llama blocks with 36 they took 13 of 20 ms a step, where each launch takes 40 us (H200,
2026-11-29). With 2048 tokens a rank these blocks took 1.18 times as long as in bf16 on two H200s.

`SHARE` covers what estimates were too high by, in parts of the GEMMs' time: at most 0.21, of SmolLM-360M under delayed
scaling before the end of its step was one kernel (H100, 16384 tokens), which was expected to gain 0.26 and gained 0.05;
the next was 0.15, of BERT-large at 32768 tokens, before GELU and cross entropy had the kernels that they have: it gains
more than is expected since (H200, 2026-11-26). docs/performance.md has estimates beside measured steps, and
tests/backend/test_size_rule.py holds them together.

Experts are weighed by what whole layers of them took (H100, 16384 tokens, 2026-11-25; docs/performance.md): with 8
experts of 14336 casts are little; with 128 of 768 the weights of all experts are cast for the work of a few tokens
each, and what the casts cost was, with current scaling, rows or blocks, 4 bytes an element of all operands at the speed
of memory, and with delayed scaling less than 2. There the saving has to be above that. Experts narrower than
`NARROW_EXPERTS` have not been measured. The host, which enters Python for each of their products, takes 6 ms to launch
a layer forward and backward: at 8192 tokens such a layer took 1.11 times as long as in bf16, and at 4096 2.1 times
(`delayed`; H200 with a slow host, 2026-11-26; 1.16 times at 4096 on another, 2026-11-29). They are weighed like
`EXPERTS_LAUNCHES` kernels a product.

Layers that are sharded over several GPUs (tensor parallelism) are weighed by what one rank multiplies. Llama-8B's on
two H200s, all of which pass, took 0.67 times as long as in bf16 (2026-11-26). Of DTensors the graph's time counts the
whole. Where the number of rows is a symbol, layers and experts are weighed by the number that was seen first, which the
reason names; where that is not known either, as of rows that an index selects, by nothing, and narrow layers are left.
Experts whose rows come from other ranks are weighed by the rows that are sent: of two layers of Qwen3-30B-A3B's on two
ranks a step took 0.81 times as long as in bf16, on four 0.73 (`delayed`, 8192 tokens a rank, H200s, 2026-11-26).

All this holds for targets with `rates`. A policy entry that names a site overrides it, and so do ranks that reduce
amaxes with this one, which have begun otherwise: Note [Ranks that agree]."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.utils import _pytree as pytree

from te_inductor import compat, targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import requires_grad, value
from te_inductor.passes.pre_grad.decide.cast_costs import (
    BackwardGemm,
    Layer,
    Layers,
    Makers,
    Scales,
    Weights,
    casts_of,
    is_view,
)
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites import exchanges
from te_inductor.passes.pre_grad.sites.products import hint
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.report import GraphWeight, WeighedLayers, Weighing
from te_inductor.recipes import Slots
from te_inductor.recipes.backward_precision import Operands

MARGIN = 1.25
SHARE = 0.2
NARROW = 1536
NARROW_EXPERTS = 768
EXPERTS_FLOPS, EXPERTS_BYTES = 1250e12, 2.6e12  # per second; with these, experts weigh as was measured
EXPERTS_MOVED: dict[Scales, int] = {"known": 2, "tensor": 4, "rows": 4, "blocks": 4}  # bytes an element of all operands
EXPERTS_LAUNCHES = 15  # of Inductor's kernels: as long the host takes for a product of experts and its casts
_LAUNCHES_OF_A_GEMM = 2  # itself, and what else is launched for it: two Llama blocks have 87 launches, 42 of GEMMs
# FSDP2's hooks around one parameter take the host as long as so many of Inductor's kernels, without a backward and with.
_LAUNCHES_OF_A_SHARD = {False: 3, True: 9}
_MOVED = {False: 1, True: 2}  # times the bytes that nodes make, by whether the graph is trained
_LINK = 4e11  # bytes a second of an exchange between two H200s of one host (2026-11-26)
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_OVERRIDE = "(a policy entry overrides this)"


def weigh(plan: Plan) -> None:
    """Refuse the sites of a graph that are better left alone, and note what was weighed."""
    weighed: list[tuple[list[Candidate], Weighing]] = []
    known: targets.Rates | None = None
    for sites, rates, refusal, weight in judge(plan):
        known = rates
        if weight is not None:
            weighed.append((sites, weight))
        for site in sites:
            site.weighed, site.refusal = not site.by_policy, None if site.by_policy else refusal
    if known is None:
        return
    device = _seconds_of_device(plan, known)
    host = _seconds_of_host(plan, known, _launches(weighed))
    asked = [(sites, weight) for sites, weight in weighed if not sites[0].by_policy]
    experts, layers = ([one for one in asked if _weigher_of(one[0][0].match) is each] for each in (EXPERTS, LAYERS))
    _refuse(experts, refusal_of_host([(weight, sites[0].low) for sites, weight in weighed], device, host))
    host = _seconds_of_host(plan, known, _launches(weighed))  # what is left of them
    _refuse(layers, refusal_of_graph([(weight, sites[0].low) for sites, weight in layers], device, host))
    plan.outcome.report.weights.append(
        GraphWeight(
            [
                WeighedLayers(tuple(site.fqn for site in sites), sites[0].low, weight, sites[0].by_policy)
                for sites, weight in weighed
            ],
            *(device, host, known.source),
        )
    )


def judge(plan: Plan) -> Iterator[tuple[list[Candidate], targets.Rates, Refusal | None, Weighing | None]]:
    """Yields sites of one input, the rates of their device, why they stay in high precision for their own sake, and what
    they weigh, if that is known; none on a device without rates."""
    low = [site for site in plan.candidates if site.low]
    makers = Makers({product.node for product in plan.products.all}, {site.match.node for site in low})
    sent = _rows_sent(plan)
    for sites in _of_one_input(site for site in low if not site.emulated):
        rates = targets.rates_of(value(sites[0].match.weight).device)
        if rates is not None:
            yield sites, rates, *_judged(sites, makers, rates, plan.options.weights, sent)


def _launches(weighed: Sequence[tuple[list[Candidate], Weighing]]) -> int:
    return sum(weight.launches for sites, weight in weighed if sites[0].low)


def _refuse(layers: Sequence[tuple[list[Candidate], Weighing]], refusal: Refusal | None) -> None:
    for sites, _ in layers:
        for site in sites:
            site.refusal = site.refusal or refusal


def _rows_sent(plan: Plan) -> dict[Any, int]:
    """How many rows a rank sends, by how many come to its experts in exchange, which a run alone can tell: as many,
    where all ranks have as many and experts are chosen evenly."""
    found: dict[Any, int] = {}
    for site in plan.experts:
        exchange = exchanges.in_front(site.match.x)
        rows = None if exchange is None else hint(value(exchange.rows).shape[0])
        if rows is not None:
            found[_expression(site.match.sizes[0])] = rows
    return found


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _of_one_input(sites: Iterable[Candidate]) -> list[list[Candidate]]:
    """Sites whose input is cast once."""
    found: dict[Any, list[Candidate]] = {}
    for site in sites:
        found.setdefault((site.match.x, site.recipe, site.by_policy), []).append(site)
    return list(found.values())


def _judged(
    sites: Sequence[Candidate], makers: Makers, rates: targets.Rates, weights: str, sent: dict[Any, int] | None = None
) -> tuple[Refusal | None, Weighing | None]:
    """Why sites of one input stay in high precision for their own sake, and what they weigh, if that is known."""
    match = sites[0].match
    m, _, k = match.sizes
    n = sum(site.match.sizes[1] for site in sites)
    rows = (sent or {}).get(_expression(m)) if hint(m) is None else hint(m)
    weigher = _weigher_of(match)
    if rows is None and weigher is EXPERTS:
        return Refusal(
            "how many rows its experts get is known at run time alone, so nothing says whether FP8 pays: N=%d, K=%d,"
            " %d experts %s",
            *(n, k, match.experts, _OVERRIDE),
        ), None
    weight = None if rows is None else weigher.weigh(rows, sites, makers, weights, rates)
    narrow = weigher.narrow if rows is None else weigher.narrow_of_rows
    if min(n, k) < narrow:
        sizes = (m, n, k, narrow, _OVERRIDE)
        return Refusal("too small for FP8 to pay: M=%s, N=%d, K=%d, where less than %d is narrow %s", *sizes), weight
    if weight is None or weight.saved_s >= weigher.margin * weight.cost_s:
        return None, weight
    shown = rows if isinstance(m, int) else f"{m} ({rows} {'at first' if hint(m) else 'sent'})"
    figures = (shown, n, k, 1e6 * weight.saved_s, 1e6 * weight.cost_s, weigher.margin, _OVERRIDE)
    return (
        Refusal(
            "too small for FP8 to pay: M=%s, N=%d, K=%d, it would save %.0f us and cost %.0f us, where it has to save %.2f"
            " times as much %s",
            *figures,
        ),
        weight,
    )


def _weigh_layers(
    rows: int, sites: Sequence[Candidate], makers: Makers, weights: str, rates: targets.Rates
) -> Weighing:
    match = sites[0].match
    dgrad, wgrad = _backward(sites)
    x = makers.of_input(match)
    if wgrad and wgrad.high and not wgrad.dequantized and x == "kernel":
        x = "shared kernel"  # wgrad reads it too
    layers = tuple(
        Layer(site.match.sizes[1], "loss" if site.match.knows_gradient else makers.of_gradient(site.match))
        for site in sites
    )
    how: Weights = "once" if weights == "once" else "each_call"
    if match.gather is not None and match.gather.refusal is None:  # of which each rank casts a part
        how = "gathered"
    return of_layers(Layers(rows, match.sizes[2], layers, x, _scales(sites[0]), dgrad, wgrad, how), rates)


def _backward(sites: Sequence[Candidate]) -> tuple[BackwardGemm | None, BackwardGemm | None]:
    """dgrad and wgrad of layers of one recipe, where any has them."""
    gemms = {gemm for site in sites for gemm, _ in site.match.gemms()}
    slots: Slots = sites[0].slots  # type: ignore[assignment]

    def of(gemm: str, operands: Operands | None) -> BackwardGemm | None:
        if gemm not in gemms:
            return None
        if operands is None:
            return BackwardGemm()
        other = operands.slots
        return BackwardGemm(None if other is None else _scales_of(other), other is None, operands.dequantized)

    return of("dgrad", slots.dgrad_operands), of("wgrad", slots.wgrad_operands)


def _weigh_experts(
    rows: int, sites: Sequence[Candidate], makers: Makers, weights: str, rates: targets.Rates
) -> Weighing:
    match, n = sites[0].match, sum(site.match.sizes[1] for site in sites)
    backward = [one for one in _backward(sites[:1]) if one and not one.high]
    each: list[Scales] = [_scales(sites[0]), *(one.scales for one in backward if one.scales)]
    dearest = max(each, key=lambda one: EXPERTS_MOVED[one])
    return of_experts(rows, n, match.sizes[2], match.experts, 1 + len(backward), dearest, rates)


@dataclass(frozen=True)
class _Weigher:
    """The way in which sites of one kind are weighed."""

    weigh: Callable[[int, Sequence[Candidate], Makers, str, targets.Rates], Weighing]  # by their rows
    margin: float  # how many times as much as it costs low precision has to save
    narrow: int  # less than this N or K is narrow where the rows are not known
    narrow_of_rows: int  # the same where they are


LAYERS = _Weigher(_weigh_layers, MARGIN, NARROW, 0)
EXPERTS = _Weigher(_weigh_experts, 1.0, NARROW_EXPERTS, NARROW_EXPERTS)


def _weigher_of(match: Match) -> _Weigher:
    return EXPERTS if match.groups else LAYERS


def _scales(site: Candidate) -> Scales:
    assert site.slots is not None
    return "known" if site.delayed else _scales_of(site.slots)


def _scales_of(slots: Slots) -> Scales:
    scope = slots.input.granularity
    return "tensor" if scope.whole else "blocks" if scope.blocked else "rows"


def of_layers(layers: Layers, rates: targets.Rates) -> Weighing:
    """What FP8 saves and costs layers of one input."""
    casts = casts_of(layers)
    low = [rates.block_flops if scales == "blocks" else rates.fp8_flops for scales in layers.each]
    saved = sum(layers.flops * (1 / rates.bf16_flops - 1 / fp8) for fp8 in low)
    cost = casts.bytes / rates.bytes + casts.launches * rates.launch
    bf16 = layers.flops * (layers.gemms + layers.high) / rates.bf16_flops
    return Weighing(bf16, saved, cost, casts.launches)


def of_experts(m: int, n: int, k: int, experts: int, gemms: int, scales: Scales, rates: targets.Rates) -> Weighing:
    """The same of experts, as measured; without a backward they read bf16 and write FP8."""
    flops, training = 2 * gemms * m * n * k, gemms > 1
    read, launches = m * k + experts * n * k, 3 * (3 if training else 2)
    moved = EXPERTS_MOVED[scales] * (read + m * n) if training else 3 * read
    saved = flops * (1 / rates.bf16_flops - 1 / EXPERTS_FLOPS)
    cost = moved / EXPERTS_BYTES + launches * rates.launch
    return Weighing(flops / rates.bf16_flops, saved, cost, EXPERTS_LAUNCHES * gemms)


def refusal_of_graph(
    layers: Sequence[tuple[Weighing, bool]],  # of one input each, and whether they would run in FP8
    device: float,  # seconds that the graph takes the device in bf16
    host: float | None,  # seconds that launching it in FP8 takes; None where nothing is launched one by one
) -> Refusal | None:
    """Why all layers of a graph stay in high precision."""
    high = sum(weight.bf16_s for weight, _ in layers)
    saved = sum(weight.saved_s for weight, low in layers if low)
    cost = sum(weight.cost_s for weight, low in layers if low)
    least = SHARE * high
    if saved - cost < least:
        figures = (1e3 * saved, 1e3 * cost, 1e3 * least, 1e3 * high, _OVERRIDE)
        return Refusal(
            "too small for FP8 to pay: the layers of this graph would save %.3g ms and cost %.3g ms, where they have to"
            " gain %.3g ms of the %.3g ms of their GEMMs %s",
            *figures,
        )
    return refusal_of_host(layers, device, host)


def refusal_of_host(layers: Sequence[tuple[Weighing, bool]], device: float, host: float | None) -> Refusal | None:
    """The same where the host could not launch them in time; layers of experts are asked this alone."""
    high = sum(weight.bf16_s for weight, _ in layers)
    if host is not None and device - host < SHARE * high:
        return Refusal(
            "too small for FP8 to pay: the host would take %.3g ms to launch this graph, which takes the device %.3g ms in"
            " bf16; CUDA graphs (mode='reduce-overhead') spare that %s",
            *(1e3 * host, 1e3 * device, _OVERRIDE),
        )
    return None


def _seconds_of_device(plan: Plan, rates: targets.Rates) -> float:
    """Seconds of all matrix products, of moving what the graph makes besides, and of rows that go to other ranks and
    back. Attention is not counted."""
    flops = sum(product.flops * _gemms(product.node) for product in plan.products.all if product.flops is not None)
    made = sum(_made(module) for module in plan.graph_modules())
    sent = sum(_made(module, "all_to_all_single") for module in plan.graph_modules())
    learns = any(_gemms(product.node) > 1 for product in plan.products.all)
    return flops / rates.bf16_flops + _MOVED[learns] * (made / rates.bytes + sent / _LINK)


def _seconds_of_host(plan: Plan, rates: targets.Rates, more: int) -> float | None:
    """Seconds that Python takes to launch the graph, with so many launches `more` than bf16 has; None where it does
    not."""
    options = plan.options
    graphs = options.inductor.get("triton.cudagraphs", options.mode in _CUDA_GRAPHS or config.triton.cudagraphs)
    if graphs or (plan.program.cpp_wrapper and not plan.leaves):
        return None
    gemms = [_gemms(product.node) for product in plan.products.all]
    whole = {id(one.whole) for one in compat.gathered()}
    hooked = _LAUNCHES_OF_A_SHARD[any(one > 1 for one in gemms)] * sum(id(given) in whole for given in plan.inputs)
    return rates.host_launch * (_LAUNCHES_OF_A_GEMM * sum(gemms) + more + hooked)


def _gemms(node: fx.Node) -> int:
    """The GEMMs of a product: forward alone, or with its backward."""
    return 3 if requires_grad(node) else 1


def _made(module: fx.GraphModule, called: str | None = None) -> int:
    """Bytes of the tensors that its nodes, or those that are called so, compute. A symbol counts as what it was
    first."""
    return sum(
        math.prod(hint(size) or 0 for size in tensor.shape) * tensor.dtype.itemsize
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method") and not is_view(node) and called in (None, name(node))
        for tensor in pytree.tree_leaves(node.meta.get("example_value"))
        if isinstance(tensor, torch.Tensor)
    )
