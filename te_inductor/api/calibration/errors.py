"""What each GEMM of each layer loses under each recipe, and how much that changes the loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor, fx

from te_inductor import ops, recipes
from te_inductor.api.accuracy import run_backward, scalar_of
from te_inductor.api.tracing import traced
from te_inductor.api.watching import TENSORS, Gradients, LayerPiece, LayerWatch, cast
from te_inductor.backend import run_passes
from te_inductor.config import Options
from te_inductor.ops.casts import ScalePair
from te_inductor.passes.pre_grad import FIND
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.recipes import Quantizer, Slots
from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.runtime.eager.delayed import scale_of

# The GEMMs whose rows each count alike: a norm divides each token by its own size, and so does Adam each weight's
# gradient. Gradients of tokens are added up in wgrad as they are, so that small ones count little there.
_BY_ROWS = ("fprop", "wgrad")


@dataclass
class _SeenModule:
    """What was seen of the layers of a module, in all graphs."""

    lost: dict[tuple[str, str], float] = field(default_factory=dict)  # by GEMM and recipe, the sum of all batches
    noise: dict[str, float] = field(default_factory=dict)  # by recipe, of the forward as the loss weighs it, likewise
    signal: dict[str, float] = field(default_factory=dict)
    past: dict[str, Tensor] = field(default_factory=dict)  # the largest amax of each tensor in the batches before
    present: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _SeenLayer:
    fqn: str
    module: _SeenModule
    slots: dict[str, Slots]  # by recipe
    gemms: list[str]


class _ErrorWatch(LayerWatch):
    """Measures products beside those of the model."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self.names = names
        self.layers: list[_SeenLayer] = []
        self.modules: dict[str, _SeenModule] = {}

    def add(self, plan: Plan) -> None:
        """Watches the layers of a graph that have been found."""
        for site in plan.candidates:
            if site.fqn not in self.names:
                continue
            slots = {name: recipes.resolve(name).slots_of(site.fqn) for name in self.names[site.fqn]}  # type: ignore[union-attr]
            if self.watch(site, len(self.layers)):
                module = self.modules.setdefault(site.fqn, _SeenModule())
                self.layers.append(_SeenLayer(site.fqn, module, slots, [gemm for gemm, _ in site.match.gemms()]))

    def end_batch(self) -> None:
        """What was seen is now the past that delayed scaling goes by."""
        for module in self.modules.values():
            for tensor, amax in module.present.items():
                module.past[tensor] = torch.maximum(amax, module.past.get(tensor, amax))
            module.present.clear()

    def see(
        self, place: int, gemm: str, pieces: Sequence[LayerPiece], a: Sequence[Tensor], b: Sequence[Tensor]
    ) -> None:
        layer = self.layers[place]
        if gemm == "dgrad":  # which is seen wherever dy is known
            self._weigh(layer, pieces, a)
        if gemm not in layer.gemms:
            return
        for name, pairs in _exact_and_low(layer, gemm, pieces, a, b):
            lost = _share_lost(*_squares(pairs), gemm in _BY_ROWS)
            layer.module.lost[gemm, name] = layer.module.lost.get((gemm, name), 0.0) + lost
        for tensor, values in zip(TENSORS[gemm], (a, b), strict=True):
            amax = torch.stack([one.abs().amax().float() for one in values if one.numel()]).amax()
            if amax > 0 and amax < torch.inf:
                present = layer.module.present
                present[tensor] = torch.maximum(amax, present.get(tensor, amax))

    def _weigh(self, layer: _SeenLayer, pieces: Sequence[LayerPiece], dys: Sequence[Tensor]) -> None:
        """Adds up the forward's errors as the loss weighs them. See Note [What an error of the forward does]."""
        module, weights = layer.module, [dy.float() for dy in dys]
        xs, ws = [piece.x for piece in pieces], [piece.weight for piece in pieces]
        for name, pairs in _exact_and_low(layer, "fprop", pieces, xs, ws):
            noise, _ = _squares(pairs, weights)
            _, signal = _squares(pairs, [weight.square().mean(1, keepdim=True).sqrt() for weight in weights])
            noise = noise.where(noise.isfinite(), signal)  # a row that is lost
            module.noise[name] = module.noise.get(name, 0.0) + noise.sum().item()
            module.signal[name] = module.signal.get(name, 0.0) + signal.sum().item()


def _exact_and_low(
    layer: _SeenLayer, gemm: str, pieces: Sequence[LayerPiece], a: Sequence[Tensor], b: Sequence[Tensor]
) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """Yields, by recipe, the product of each piece as it is and in low precision."""
    apart = torch.autocast(pieces[0].x.device.type, enabled=False)
    with apart:
        exact = [one.float() @ other.float().t() for one, other in zip(a, b, strict=True)]
    for name, slots in layer.slots.items():
        with apart:
            low = list(_products(layer, name, slots, gemm, pieces, a, b))
        yield name, list(zip(exact, low, strict=True))


def _products(
    layer: _SeenLayer, name: str, slots: Slots, gemm: str, pieces: Sequence[LayerPiece], a: Any, b: Any
) -> Iterator[Tensor]:
    """Yields the product of each piece under a recipe."""
    operands = []
    for tensor, values in zip(TENSORS[gemm], (a, b), strict=True):
        quantizer = getattr(slots, tensor)
        known = _of_the_past(layer.module.past.get(tensor), quantizer) if name == "delayed" else None
        operands.append(cast(gemm, tensor, pieces, values, quantizer, known))
    for one, other in zip(*operands, strict=True):
        yield ops.product(one, other, None, getattr(slots, gemm), torch.float32)


def _of_the_past(amax: Tensor | None, quantizer: Quantizer) -> ScalePair | None:
    """The scale of delayed scaling; None in a first step, in which tensors are cast by their own amaxes."""
    if amax is None:
        return None
    update = ScaleUpdate(DelayedScaling(), quantizer.element)
    scale = scale_of(amax.view(1), torch.ones_like(amax.view(1)), update)[0]
    return ScalePair(scale, scale.reciprocal())


def _squares(pairs: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The squares of a product's errors and of its values, each times its weight's, row by row."""
    weighed = weights or [exact.new_ones(()) for exact, _ in pairs]
    given = [(exact, low, weight) for (exact, low), weight in zip(pairs, weighed, strict=True)]
    noise = torch.cat([((low - exact) * weight).double().square().sum(1) for exact, low, weight in given])
    signal = torch.cat([(exact * weight).double().square().sum(1) for exact, _, weight in given])
    return noise, signal


def _share_lost(noise: Tensor, signal: Tensor, by_rows: bool) -> float:
    """What is lost of a product: the mean of its rows' shares, or the share of the whole. A row that is lost, or not
    finite, counts as 1; one of zeros counts as nothing."""
    if not by_rows:
        noise, signal = noise.sum(0, keepdim=True), signal.sum(0, keepdim=True)
    noise, signal = noise[signal > 0], signal[signal > 0]
    return torch.nan_to_num(noise / signal, nan=1.0).clamp(max=1.0).mean().item() if len(signal) else 0.0


class _LossWatch(_ErrorWatch):
    """Puts the product of one layer's forward in low precision in the place of its own."""

    active: str | None = None

    @torch.no_grad()
    def measure(self, place: int, pieces: Sequence[LayerPiece]) -> Gradients:
        return lambda _: None

    def change(self, place: int, pieces: Sequence[LayerPiece], y: Tensor) -> Tensor:
        layer = self.layers[place]
        if layer.fqn != self.active:
            return y
        [(name, slots)] = layer.slots.items()
        y = y.clone()
        with torch.autocast(y.device.type, enabled=False):
            low = _products(
                layer, name, slots, "fprop", pieces, [piece.x for piece in pieces], [one.weight for one in pieces]
            )
            for piece, product in zip(pieces, low, strict=True):
                exact = piece.x.float() @ piece.weight.float().t()
                y[piece.rows] += (product - exact).view(y[piece.rows].shape).to(y.dtype)
        return y


@contextmanager
def _watching(model: Callable[..., Any], watch: _ErrorWatch, options: Options) -> Iterator[Callable[..., Any]]:
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, options, example_inputs)
        if run_passes(plan, FIND).failure is None:
            watch.add(plan)
        for module in plan.graph_modules():
            module.recompile()
        return gm.forward

    with traced(model, backend, options.fallback) as run:
        yield run


Batch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call


# Note [What an error of the forward does]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# An error e in the output y of a layer moves the loss by about g · e, where g is the loss's gradient with respect to y.
# Errors of rounding are as often above as below, each by itself, so that the square of that is expected to be the sum of
# g² e² over all elements. The same sum is, times half the number of tokens, how far errors are expected to raise the loss
# in the second order, by the diagonal of the empirical Fisher information (squares of the tokens' gradients in the place
# of the loss's second derivatives). Relative errors of outputs rank layers otherwise: all are rounded to as many bits, but
# the output layer's reach the loss directly, and those of queries and keys hardly at all.


@dataclass(frozen=True)
class Lost:
    """What products lose, and how much that counts."""

    shares: dict[str, dict[str, dict[str, float]]]  # by module path, GEMM and recipe
    weights: dict[str, float]  # by module path, of what its forward loses: 1 in a typical layer

    def counted(self, fqn: str, gemm: str, name: str) -> float:
        weight = self.weights.get(fqn, 1.0) if gemm == "fprop" else 1.0
        return weight * self.shares.get(fqn, {}).get(gemm, {}).get(name, 0.0)


def errors_of(
    model: Callable[..., Any],
    batches: Sequence[Batch],
    names: Mapping[str, Sequence[str]],  # by module path, the recipes to measure
    loss: Callable[[Any], Tensor] | None,
    options: Options,
) -> Lost:
    """What each product loses, the mean over all batches, the sum over the calls of a module. The forward's errors are
    weighed by the gradients that they meet, where there are any."""
    watch = _ErrorWatch(names)
    with _watching(model, watch, options) as run:
        for args, kwargs in batches:
            run_backward(scalar_of(run(*args, **kwargs), loss))
            watch.end_batch()
    shares: dict[str, dict[str, dict[str, float]]] = {}
    signals: dict[str, float] = {}
    for fqn, module in watch.modules.items():
        for (gemm, name), lost in module.lost.items():
            shares.setdefault(fqn, {}).setdefault(gemm, {})[name] = lost / len(batches)
        for name, signal in module.signal.items():
            if 0 < signal < float("inf"):
                signals[fqn] = signal
                shares[fqn]["fprop"][name] = module.noise[name] / signal
    typical = geometric_mean(signals.values()) if signals else 1.0
    return Lost(shares, {fqn: signal / typical for fqn, signal in signals.items()})


@torch.no_grad()
def sensitivities_of(
    model: Callable[..., Any],
    batches: Sequence[Batch],
    names: Mapping[str, str],  # by module path, the recipe that its forward has alone
    loss: Callable[[Any], Tensor] | None,
    options: Options,
) -> dict[str, float]:
    """How far the loss moves where one layer's forward alone is in low precision, relative to the loss: the mean over
    all batches."""
    watch = _LossWatch({fqn: [name] for fqn, name in names.items()})
    with _watching(model, watch, options) as run:

        def losses() -> list[float]:
            made = [scalar_of(run(*args, **kwargs), loss) for args, kwargs in batches]
            return [float("nan") if one is None else one.item() for one in made]

        base, found = losses(), {}
        for fqn in names:
            watch.active = fqn
            moved = (abs(one / was - 1) for one, was in zip(losses(), base, strict=True) if was)
            found[fqn] = sum(moved) / len(batches)
    return found
