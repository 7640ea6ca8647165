"""`accuracy_report(model, *inputs)`: what each operand of each low-precision GEMM loses, layer by layer.

The model runs once in high precision, forward and backward, and each layer's own tensors are quantized beside it. So a
figure is one layer's alone: no error of an earlier layer is in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from te_inductor import ops
from te_inductor.api.accuracy_figures import AccuracyReport, GemmAccuracy, OperandAccuracy
from te_inductor.api.tracing import traced
from te_inductor.api.watching import COLUMNWISE, TENSORS, LayerPiece, LayerWatch, cast
from te_inductor.backend import parse, run_passes
from te_inductor.config import Options
from te_inductor.errors import OptionError, wrong_type
from te_inductor.numerics import blocks, microscaling
from te_inductor.ops.casts import ScalePair
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import holder_path
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.pre_grad import DECIDE
from te_inductor.passes.pre_grad.decide.report import plain
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.presentation.report import Report, merge
from te_inductor.recipes import Quantizer, Recipe, Slots
from te_inductor.runtime.state.state_sites import SLOTS, StateSite, weight_site

LiveScale = Callable[[Tensor, StateSite, Recipe], Tensor | None]  # of a parameter's quantizer
_SLACK = 1 + 2**-20  # of a scale's roundings: the amax itself is not saturated


def accuracy_report(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> AccuracyReport:
    """What `torch.compile(model, backend="te", options=options)` loses in each layer: per GEMM operand the SQNR, the
    shares of values that saturate and that underflow, and the amax; per GEMM the SQNR of its product.

    Runs the model once, uncompiled and in high precision, on `inputs` and `kwargs`. Gradients are those of
    `loss(output)`; without it, of the output's `loss` where it has one, else of the mean square of its floating-point
    tensors. Without anything that requires a gradient there is fprop alone. No `.grad` is written, and the random state
    is left as it was. Delayed scaling is measured with scales of the tensors themselves, merged layers each for itself;
    experts whose rows come from other ranks are not measured.

    Raises:
        OptionError, RecipeError: the options are wrong; `loss` returns no scalar.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    return accuracy_of(model, inputs, kwargs, parse(None, options), loss)


def accuracy_of(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    parsed: Options,
    loss: Callable[[Any], Tensor] | None,
    scale_of: LiveScale | None = None,
) -> AccuracyReport:
    """`accuracy_report` of parsed options. A tensor is measured with the scale that `scale_of` finds, else with its
    own."""
    if loss is not None and not callable(loss):
        raise OptionError(wrong_type("loss", loss, "a function of the model's output"))
    recorder = _Recorder()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, parsed, example_inputs)
        recorder.reports.append(run_passes(plan, DECIDE))
        for candidate in plan.candidates:
            if candidate.low:
                recorder.add(candidate, {} if scale_of is None else _known(plan, candidate, scale_of))
        for module in plan.graph_modules():
            module.recompile()
        return gm.forward

    with traced(model, backend, parsed.fallback) as run:
        run_backward(scalar_of(run(*inputs, **kwargs), loss))
    return AccuracyReport(recorder.gemms(), merge(recorder.reports).sites)


def _known(plan: Plan, candidate: Candidate, scale_of: LiveScale) -> dict[str, ScalePair]:
    """The scales of a layer's tensors that are not their own, by slot."""
    bodies, recipe = Bodies(plan.gm), candidate.recipe
    owner = owner_of(candidate.match.weight, bodies)
    if owner is None or recipe is None:
        return {}
    node = owner.parameter
    held = node.op == "get_attr"
    parameter = plan.gm.get_parameter(str(node.target)) if held else plan.inputs[bodies.place_of(node)]
    found = {}
    for slot in SLOTS:
        site = StateSite(candidate.module, holder_path(node), owner.part, slot)
        scale = scale_of(parameter, weight_site(owner.part) if slot == "weight" else site, recipe)
        if scale is not None:
            found[slot] = ScalePair(scale.clone(), scale.reciprocal())
    return found


def scalar_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """What gradients are of: `loss(output)`, else the output's `loss` where it has one, else the mean square of its
    floating-point tensors; None where it has none.

    Raises:
        OptionError: `loss` returns no scalar.
    """
    made = getattr(output, "loss", None)
    if loss is not None:
        made = loss(output)
        if not isinstance(made, Tensor) or made.numel() != 1:
            raise OptionError(f"loss returned {made!r:.80}, expected a tensor of one number")
    if not isinstance(made, Tensor):
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        made = torch.stack([tensor.float().square().mean() for tensor in tensors]).sum() if tensors else None
    return made


def run_backward(made: Tensor | None) -> None:
    if made is not None and made.requires_grad:
        leaves = [node for node in _leaves(made) if node.requires_grad]
        torch.autograd.grad(made.sum(), leaves, allow_unused=True)


def _leaves(tensor: Tensor) -> list[Tensor]:
    """What the gradient of a tensor flows to."""
    found, seen, pending = [], set(), [tensor.grad_fn]
    for node in pending:  # which grows
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        pending += [following for following, _ in node.next_functions]
    return found


@dataclass
class _Sums:
    """The sums of one operand, or of one product, over all calls of its layer."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0
    nonzero: int = 0
    saturated: int = 0
    underflowed: int = 0
    amax: float = 0.0

    def add(self, exact: Tensor, low: Tensor, limit: Tensor | None = None) -> None:
        exact, low = exact.double(), low.double()
        self.signal += exact.square().sum().item()
        self.noise += (low - exact).square().sum().item()
        self.count += exact.numel()
        self.amax = max(self.amax, exact.abs().max().item()) if exact.numel() else self.amax
        if limit is not None:
            self.nonzero += int((exact != 0).sum())
            self.saturated += int(((exact.abs() > limit * _SLACK) & (limit > 0)).sum())
            self.underflowed += int(((low == 0) & (exact != 0)).sum())


@dataclass
class _MeasuredLayer:
    """What is known of the GEMMs of one layer."""

    candidate: Candidate
    slots: Slots
    shapes: dict[str, tuple[Any, int, int]]
    known: dict[str, ScalePair] = field(default_factory=dict)  # scales that are not the tensor's own, by slot
    operands: dict[tuple[str, str], _Sums] = field(default_factory=dict)  # by GEMM and tensor
    products: dict[str, _Sums] = field(default_factory=dict)

    def slots_of(self, gemm: str) -> Slots:
        """The slots that cast the operands of a GEMM."""
        operands = getattr(self.slots, f"{gemm}_operands", None)
        return self.slots if operands is None or operands.slots is None else operands.slots

    def see(self, gemm: str, pieces: Sequence[LayerPiece], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        operands = [self._operands(gemm, *one, pieces) for one in zip(TENSORS[gemm], (a, b), strict=True)]
        for one, other in zip(*operands, strict=True):
            for operand in (one, other):
                sums = self.operands.setdefault((gemm, operand.tensor), _Sums())
                sums.add(operand.exact, operand.low, operand.limit)
            with torch.autocast(one.exact.device.type, enabled=False):
                exact = one.exact.double() @ other.exact.double().t()
            low = ops.product(one.copy, other.copy, None, getattr(self.slots, gemm), torch.float32)
            self.products.setdefault(gemm, _Sums()).add(exact, low)

    def _operands(
        self, gemm: str, tensor: str, values: Sequence[Tensor], pieces: Sequence[LayerPiece]
    ) -> "list[_Operand]":
        slots = self.slots_of(gemm)
        quantizer, known = getattr(slots, tensor), self.known.get(tensor) if slots is self.slots else None
        transformed = quantizer.hadamard and (gemm, tensor) in COLUMNWISE
        copies = cast(gemm, tensor, pieces, values, quantizer, known)
        return [_Operand(tensor, *one, quantizer, transformed) for one in zip(values, copies, strict=True)]


class _Operand:
    """A copy, what it was cast from, and what it stands for."""

    def __init__(self, tensor: str, exact: Tensor, copy: ops.Copy, quantizer: Quantizer, transformed: bool) -> None:
        self.tensor, self.copy = tensor, copy
        self.exact = microscaling.exact_hadamard(exact) if transformed else exact.float()
        scope, factor = quantizer.granularity, 1.0 if copy.amax is None else copy.amax / quantizer.two_level_max
        columns = self.exact.shape[1]
        self.low = (blocks.values(copy.data, copy.scale_inv, quantizer.format, scope) * factor)[:, :columns]
        scale = blocks.spread(blocks.scale_values(copy.scale_inv, scope), scope, self.exact.shape)
        self.limit = scale.expand(self.exact.shape) * factor * quantizer.format.max


class _Recorder(LayerWatch):
    """Sits behind each low-precision layer."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.layers: list[_MeasuredLayer] = []

    def add(self, candidate: Candidate, known: dict[str, ScalePair]) -> None:
        match, slots = candidate.match, candidate.slots
        assert slots is not None  # of a layer that is low
        if self.watch(candidate, len(self.layers)):
            low = {gemm: shape for gemm, shape in match.gemms() if not getattr(slots, gemm).is_high}
            self.layers.append(_MeasuredLayer(candidate, slots, low, known))

    def see(
        self, place: int, gemm: str, pieces: Sequence[LayerPiece], a: Sequence[Tensor], b: Sequence[Tensor]
    ) -> None:
        layer = self.layers[place]
        if gemm in layer.shapes:
            layer.see(gemm, pieces, a, b)

    def gemms(self) -> list[GemmAccuracy]:
        return [
            _gemm(layer, name, shape)
            for layer in self.layers
            for name, shape in layer.shapes.items()
            if name in layer.products
        ]


def _gemm(layer: _MeasuredLayer, name: str, shape: tuple[Any, int, int]) -> GemmAccuracy:
    assert layer.candidate.recipe is not None
    operands = []
    for tensor in TENSORS[name]:
        sums, quantizer = layer.operands[name, tensor], getattr(layer.slots_of(name), tensor)
        operands.append(
            OperandAccuracy(
                tensor,
                quantizer.label(columnwise=name == "wgrad"),
                sums.amax,
                _decibels(sums),
                sums.saturated / max(sums.count, 1),
                sums.underflowed / max(sums.nonzero, 1),
            )
        )
    a, b = operands
    product = _decibels(layer.products[name])
    return GemmAccuracy(layer.candidate.fqn, name, plain(shape), layer.candidate.recipe.name, a, b, product)


def _decibels(sums: _Sums) -> float | None:
    """None where it is infinite, or there is no signal."""
    if not (0 < sums.noise < float("inf") and 0 < sums.signal < float("inf")):
        return None
    return 10 * math.log10(sums.signal / sums.noise)
