"""Weights that a program holds in E4M3 and dequantizes in front of each layer, as ``F.linear(x, w8.to(x.dtype) * scale)``.

Such a weight is no parameter in high precision to cast: its values are what a GEMM multiplies, and casting what it was
dequantized to would find another scale and round each value again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.operands import HeldValues
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind
from te_inductor.passes.graph.values import is_tensor, requires_grad, value
from te_inductor.passes.graph.writes import Writes
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.passes.pre_grad.sites.requirements import DTYPES
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import DelayedScaling, Recipe, Slots
from te_inductor.recipes.formats import ALIGNMENT, E4M3, ROW, TENSOR

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class HeldWeight(SitePart):
    """What a layer's weight is dequantized from."""

    data: fx.Node  # (N, K)
    scale: fx.Node | None  # of one element, or (N, 1); None: the values are the weight

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        held = value(self.data)
        shape = spec.slots.weight.granularity.scale_shape(*held.shape)
        if self.scale is None:
            constants: Any = {"dtype": torch.float32, "device": held.device}
            scale = graph.call_function(_aten.full.default, (shape, 1.0), constants)
        else:
            wide = graph.call_function(_aten.to.dtype, (self.scale, torch.float32))
            scale = graph.call_function(_aten.reshape.default, (wide, shape))
        return replace(spec, weight=HeldValues()), {"of_weight": [self.data, scale]}

    def reads(self) -> Sequence[fx.Node]:
        return [self.data] if self.scale is None else [self.data, self.scale]

    def refuse_kept(self, slots: Slots) -> Refusal | None:
        return Refusal("the program holds it in %s, which is multiplied as it is", E4M3.name)

    def refuse_loss(self) -> Refusal | None:
        return Refusal("the program holds its weight in %s", E4M3.name)

    def may_merge(self, match: Match, slots: Slots) -> bool:
        return False


def held_weight(match: Match, recipe: Recipe, slots: Slots, writes: Writes) -> HeldWeight | None:
    """What the weight of a dense layer is dequantized from, where its values are copies as the recipe casts them."""
    quantizer, path = slots.weight, list[fx.Node]()
    found = _read(match.weight, path)
    if found is None or match.transposed or match.dims != 2 or isinstance(recipe, DelayedScaling):
        return None
    (n, k), scale = value(found.data).shape, None if found.scale is None else value(found.scale).shape
    scopes = (TENSOR, ROW) if scale is None else (TENSOR,) if scale.numel() == 1 else (ROW,) if scale == (n, 1) else ()
    fits = all(isinstance(size, int) and size % ALIGNMENT == 0 for size in (n, k))
    if quantizer.format is not E4M3 or quantizer.granularity not in scopes or not fits:
        return None
    nodes = [*path, *found.reads()]
    return None if writes.between(nodes, min(nodes), match.node) else found


def _read(weight: fx.Node, path: list[fx.Node]) -> HeldWeight | None:
    """A cast of a matrix in E4M3, or its product with scales, which may be cast once more. `path` gets the nodes that
    lead there, none of which may be written to."""
    path.append(weight)
    if operators.read(weight).kind is Kind.CAST and weight.args and is_tensor(weight.args[0]) and not _is_held(weight):
        weight = weight.args[0]  # type: ignore[assignment]
        path.append(weight)
    scale, cast = None, weight
    if operators.read(weight) == operators.Operator("mul", Kind.POINTWISE):
        factors = [one for one in weight.args if is_tensor(one)]
        casts = [one for one in factors if _is_held(one)]
        if len(factors) != 2 or len(casts) != 1:
            return None
        [cast] = casts
        path.append(cast)
        [scale] = [one for one in factors if one is not cast]
        number, held = value(scale), value(cast)
        # A product reads a number that lies on the CPU, too; a GEMM does not.
        if requires_grad(scale) or not number.is_floating_point() or number.device != held.device:
            return None
    return HeldWeight(cast.args[0], scale) if _is_held(cast) else None  # type: ignore[arg-type]


def _is_held(cast: fx.Node) -> bool:
    """Whether it casts an E4M3 matrix that lies row by row, which bf16 and fp16 hold exactly."""
    if operators.read(cast).kind is not Kind.CAST or not cast.args or not is_tensor(cast.args[0]):
        return False
    held: torch.Tensor = value(cast.args[0])  # type: ignore[arg-type]
    is_matrix = held.dtype == E4M3.dtype and held.dim() == 2 and held.is_contiguous()
    return is_matrix and value(cast).dtype in DTYPES and value(cast).shape == held.shape
