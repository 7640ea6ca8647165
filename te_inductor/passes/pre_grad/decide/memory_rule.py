"""Output layers whose gradient takes more memory in FP8 than all other layers save.

# Note [Memory rule]
A backward begins with the gradient of the logits, when all that the forward saved is still in memory: there a step has
its peak. In bf16 that gradient takes the place of the logits. In FP8 its two copies, a byte an element each, stand
beside the logits that they are computed from. Layers in front save memory, as they keep their input in FP8: by
measurement about `SAVED` bytes for each element of it, since what is made of it is kept less often too: 45 KB a token
and layer of Llama-3-8B (26.6 thousand elements: 1.7), and 33 KB of Llama-3.2-1B (14.3 thousand: 2.3;
docs/performance.md). Where layers are computed again, in regions of activation checkpointing, they save nothing at
the peak.

So models as deep as published ones have their output layer in FP8, and a peak below that of bf16. Two layers of them,
with the whole vocabulary, had a peak of 1.21 (Llama-3.2-1B), 1.31 (SmolLM-360M) and 1.45 times bf16's (Qwen3-0.6B; 8192
tokens, H200, 2026-11-26): there the output layer stays in bf16, which the reason says, with the price in bytes. Its
GEMMs were most of what those models gained.

An output layer is one behind which the graph has no other product, and that is `WIDE` times as wide as its input."""

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import Bodies, in_order
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.products import hint

SAVED = 2.0  # bytes an element of a layer's input
WIDE = 4
MIB = 2**20


def spare(plan: Plan) -> None:
    """Leave the output layer of a graph that would need more memory than in bf16."""
    sites = [site for site in plan.candidates if site.low and not site.emulated]
    output = next(iter(_outputs(plan, sites)), None)
    if output is None or output.by_policy:
        return
    if output.match.knows_gradient:
        return  # it has one copy, and no logits beside it
    if targets.rates_of(value(output.match.weight).device) is None:
        return
    taken = _gradient_bytes(output)
    saved = _saved_bytes(plan, [site for site in sites if site is not output])
    if taken > saved:
        output.refusal = Refusal(
            "the gradient of its output would take %d MiB more than in bf16, and the graph's other layers save %d MiB"
            " (a policy entry overrides this)",
            *(round(taken / MIB), round(saved / MIB)),
        )


def balance(plan: Plan) -> float:
    """The bytes that low precision takes at the peak of a step beyond bf16, less than nothing where it saves some: of
    layers that are trained, as the rule counts them."""
    low = [site for site in plan.candidates if site.low and not site.emulated and len(list(site.match.gemms())) > 1]
    outputs = [site for site in _outputs(plan, low) if not site.match.knows_gradient]
    return sum(map(_gradient_bytes, outputs)) - _saved_bytes(plan, [site for site in low if site not in outputs])


def _outputs(plan: Plan, sites: list[Candidate]) -> list[Candidate]:
    """The output layers among some sites. The graph is walked once, however many sites there are."""
    products = {product.node for product in plan.products.all}
    last = next((node for node in reversed(list(in_order(plan.gm))) if node in products), None)
    behind = [site for site in sites if site.match.node is last and site.match.dims == 2]
    return [site for site in behind if bool(site.match.sizes[1] >= WIDE * site.match.sizes[2])]


def _gradient_bytes(site: Candidate) -> float:
    """The bytes of the copies of the gradient of its output, one for each GEMM of the backward."""
    m, n, _ = site.match.sizes
    backward = [gemm for gemm, _ in site.match.gemms() if gemm != "fprop"]
    return (hint(m) or 0) * n * len(backward)


def _saved_bytes(plan: Plan, sites: list[Candidate]) -> float:
    bodies = Bodies(plan.gm)
    inputs = {
        site.match.x: (hint(site.match.sizes[0]) or 0) * site.match.sizes[2]
        for site in sites
        if not bodies.is_computed_again(site.match.node.graph)
    }
    return SAVED * sum(inputs.values())
