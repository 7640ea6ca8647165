"""`te-inductor bench --predict h100`: what a model's step is expected to take on a device, which need not be here, by
family of kernels. Each arm is a report of `explain` about that device: nothing runs on it."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_inductor import targets
from te_inductor.api.explanation import explain
from te_inductor.command.factory import in_bf16, made, options_of
from te_inductor.kernels import cutlass_tables
from te_inductor.passes.pre_grad.decide.size_rule import EXPERTS_FLOPS
from te_inductor.presentation.report import Expected, Report, Site
from te_inductor.presentation.tables import Column, tabulated
from te_inductor.recipes import Recipe, resolve
from te_inductor.targets import Rates

BASE = "inductor"
HIGH, CASTS, REST = "high_precision", "casts", "the rest"
_LAST = (CASTS, REST)


def run(arguments: argparse.Namespace) -> int:
    """Print what all arms are expected to take."""
    there = targets.by_name(arguments.predict)
    case, autocast = in_bf16(made(arguments.model, arguments.set), arguments.keep_dtype)
    found: dict[str, Any] = {}
    for recipe in dict.fromkeys(arguments.recipes):
        torch._dynamo.reset()
        options = {**options_of(recipe, arguments.policy), "fallback": "silent"}
        with autocast, torch.set_grad_enabled(not arguments.forward):
            report = explain(case.model, *case.inputs, options=options, target=arguments.predict, **case.kwargs)
        found.setdefault(BASE, predicted(report, None, there))
        found[recipe] = predicted(report, resolve(recipe), there)
    if arguments.json:
        print(json.dumps({"predicted": found, "device": there.product}, indent=1))
        return 0
    what = "forward" if arguments.forward else "forward and backward"
    print(f"{arguments.model}: {what}, expected on {there.product}: a prediction, for which nothing ran on it")
    print()
    names = dict.fromkeys(name for one in found.values() for name in one["ms"])
    families = [*(name for name in names if name not in _LAST), *(name for name in _LAST if name in names)]
    columns = ("arm", "step ms", "speed-up", *families, "peak MiB beside bf16's")
    print(tabulated([Column(name, right=name != "arm") for name in columns], list(_rows(found, families))))
    print()
    print(_sources(there, report.expected))
    return 0


def predicted(report: Report, recipe: Recipe | None, there: targets.Target) -> dict[str, Any]:
    """The milliseconds of a step, and of them those of each family of kernels, as a report about a recipe has them; of
    None those in bf16."""
    expected, rates = report.expected, targets.rates_in(there)
    assert expected is not None
    peak = expected.peak_bytes if recipe is not None else 0
    seconds = expected.step_s if recipe is not None else expected.bf16_s
    if rates is None or seconds is None:
        return {"step_ms": None, "ms": {}, "peak_bytes": peak}
    ms: dict[str, float] = {}
    for site in report.sites:
        family = HIGH if recipe is None else site.kernel.partition(":")[0]
        ms[family] = ms.get(family, 0.0) + 1e3 * _seconds(site, recipe, rates)
    casts = sum(one.weight.cost_s for graph in report.weights for one in graph.layers if one.low)
    ms |= {CASTS: 1e3 * casts} if casts and recipe is not None else {}
    ms[REST] = max(1e3 * seconds - sum(ms.values()), 0.0)
    return {"step_ms": 1e3 * seconds, "ms": ms, "peak_bytes": peak}


def _seconds(site: Site, recipe: Recipe | None, rates: Rates) -> float:
    """The time of one GEMM, by the rates that the size rule weighs by; nothing where a size is not known."""
    if not all(isinstance(size, int) for size in site.shapes):
        return 0.0
    m, n, k = site.shapes
    if site.kernel in (HIGH, "emulated") or recipe is None:
        flops = rates.bf16_flops
    elif site.pattern == "grouped_linear":
        flops = EXPERTS_FLOPS
    else:
        flops = rates.block_flops if recipe.slots().fprop.blocked else rates.fp8_flops
    return float(2 * m * n * k / flops)


def _rows(found: Mapping[str, Any], families: Sequence[str]) -> Any:
    base = found[BASE]["step_ms"]
    for arm, one in found.items():
        step, peak = one["step_ms"], one["peak_bytes"]
        yield (
            arm,
            "-" if step is None else f"{step:.3g}",
            "-" if step is None or base is None else f"{base / step:.2f}",
            *(f"{one['ms'][name]:.3g}" if name in one["ms"] else "" for name in families),
            "-" if peak is None else f"{peak / 2**20:+.0f}",
        )


def _sources(there: targets.Target, expected: Expected | None) -> str:
    """What the figures follow from, and what is in none of them."""
    rates, table = targets.rates_in(there), cutlass_tables.of(there.product)
    if rates is None:
        return f"no GEMM was timed on {there.product}, so that no time is known; kernels are those of `te-inductor explain`"
    text = f"GEMMs by rates {rates.source}"
    text += "" if table is None else f"; CUTLASS's tiles by the table of {table.device}, {table.dates}"
    without = expected.without if expected is not None else None
    text += f"; kernels are those without CUTLASS, as {without}" if without else ""
    return f"{text}.\nAttention, the loss and the optimizer are in no figure, so that a whole step gains less."
