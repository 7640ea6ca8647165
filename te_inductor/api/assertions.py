"""`assert_low_precision(model, *inputs)`: a test of one's own that a compiled model runs in low precision."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from te_inductor.api.eager_products import EagerProducts, Names, report_of
from te_inductor.errors import FallbackError, OptionError, wrong_type
from te_inductor.presentation.paths import grouped, names_of, shown
from te_inductor.presentation.report import Report, Site, merge
from te_inductor.recipes.backward_precision import WORDS
from te_inductor.runtime import compiled_graphs
from te_inductor.runtime.compiled_graphs import CompiledGraph

_ASKED = "recipe 'none', by the options, the policy or autocast"


def assert_low_precision(
    model: Callable[..., Any], *inputs: Any, high_precision: Iterable[str] = (), **kwargs: Any
) -> Report:
    """Call a compiled model once, and raise if a linear layer ran in high precision.

    Unlike `explain`, which says what a compile would do, this sees what runs: layers that no compiled graph reached,
    because of a graph break or of code that Dynamo skips, and models that are compiled piece by piece. It uses torch's
    profiler, and costs other calls nothing. A layer that is emulated has its low-precision values, and passes. One that
    does not run in this call is not judged, nor is a graph of another backend.

    Args:
        model: what `torch.compile(..., backend="te")` returned, or a model or function that calls what it returned.
        inputs: the call's, as are `kwargs`. Gradients and the random state are left as they were.
        high_precision: globs over module paths from `model`'s root, of layers that are meant to be in high precision, such
            as those that the policy excludes.

    Returns:
        The report of the graphs that ran. Layers are named from the root of `model`; where one graph serves several
        layers, as of equal blocks, it is named by the first.

    Raises:
        FallbackError: a layer ran in high precision, none ran in low precision, or an entry of `high_precision` matches
            none that is in high precision. The text lists the layers by reason.
        OptionError: `high_precision` is a string.
        TEInductorError: it is called inside a profiler.
    """
    if isinstance(high_precision, str):
        raise OptionError(wrong_type("high_precision", high_precision, "a list of module-path globs"))
    eager = EagerProducts()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), compiled_graphs.ran() as graphs, eager:
        model(*inputs, **kwargs)
    names = Names(model, (*inputs, *kwargs.values()))
    reports = [_from_root(graph, names) for graph in graphs]
    report = merge([*reports, report_of(eager.found, names, lambda *_: "none")])
    _check(report, list(high_precision))
    return report


def _from_root(graph: CompiledGraph, names: Names) -> Report:
    """A graph's report by module paths from the root of the model, not from that of what was compiled."""
    paths = {}
    for fqn, reference in graph.weights.items():
        weight = reference()
        path = None if weight is None else names.of(weight)
        paths[fqn] = fqn if path is None else path
    sites = [
        replace(site, fqn=paths.get(site.fqn, site.fqn), merged=tuple(paths.get(fqn, fqn) for fqn in site.merged))
        for site in graph.report.sites
    ]
    return replace(graph.report, sites=sites)


def _matches(fqn: str, glob: str) -> bool:
    """Whether a glob that was written for the model, or for what is around it, names a layer."""
    return any(fnmatchcase(name, glob) for name in names_of(fqn))


def _by_recipe(site: Site) -> str:
    """Returns why a GEMM is in high precision where no refusal says it."""
    if site.recipe == "none":
        return _ASKED
    return f"{site.gemm} with a weight that is stored as {site.recipe!r} is multiplied in high precision"


def _check(report: Report, allowed: list[str]) -> None:
    sites = [site for site in report.sites if not site.outside]
    high = [site for site in sites if site.kernel == "high_precision" and site.recipe not in WORDS]
    wrong = [site for site in high if not any(_matches(site.fqn, glob) for glob in allowed)]
    lines = grouped(wrong, lambda site: site.reason or _by_recipe(site))
    meant = [*high, *(site for site in report.sites if site.outside)]  # which may be named all the same
    unused = [glob for glob in allowed if not any(_matches(site.fqn, glob) for site in meant)]
    text = [f"  {reason}: {shown(site.fqn for site in own)}" for reason, own in lines.items()]
    if text:
        count = len({site.fqn for site in wrong})
        text.insert(0, f"te_inductor: {count} of {len({site.fqn for site in sites})} layers ran in high precision:")
        text.append("mend that, or name them in high_precision=[...] where it is meant")
    if unused:
        text.append(
            f"te_inductor: high_precision entries match no layer that ran in high precision: {', '.join(unused)}"
        )
    if len(high) == len(sites) and not text:
        text.append(
            "te_inductor: no layer ran in low precision, expected a call of what torch.compile(backend='te') made"
        )
    if text and report.failure:
        text.append(report.failure)
    if text:
        raise FallbackError("\n".join(text))
