"""The forms in which models write a linear layer: F.linear, products with a parameter, addmm, batched products."""

from typing import Any, ClassVar

import torch
from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.operators import Call
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.sites.part import Unfit
from te_inductor.passes.pre_grad.sites.rule import Emit, Match, Rule, replace_layer


def _of_activation(x: Any, weight: Any) -> bool:
    """Whether it is a product of an activation, and not of two parameters, as where an adapter's are multiplied to be
    added to a weight."""
    return is_tensor(x) and from_parameter(weight) and not from_parameter(x)


def operands_of(node: fx.Node, *names: str) -> tuple[Any, Any]:
    """Both operands of a product that is called by one of these names."""
    call = Call.read(node)
    if call is None or call.name not in names:
        return None, None
    return call.operands.get("input"), call.operands.get("other", call.operands.get("mat2"))


class LinearCall(Rule):
    """``F.linear(x, w, bias)``, which `nn.Linear` calls."""

    pattern: ClassVar[str] = "linear"
    joins: ClassVar[bool] = True

    def match(self, node: fx.Node) -> Match | None:
        call = Call.read(node)
        if call is None or call.name != "linear":
            return None
        x, weight, bias = (call.operands.get(name) for name in ("input", "weight", "bias"))
        if not (is_tensor(x) and is_tensor(weight)) or value(weight).dim() != 2:  # type: ignore[arg-type]
            return None
        return Match(node, x, weight, bias)  # type: ignore[arg-type]


class ParameterProduct(Rule):
    """``x @ p``, `torch.matmul`, `torch.mm`, where p is a (K, N) parameter or a view of one."""

    pattern: ClassVar[str] = "matmul"

    def match(self, node: fx.Node) -> Match | None:
        x, weight = operands_of(node, "matmul", "mm")
        if not _of_activation(x, weight) or value(weight).dim() != 2:  # type: ignore[arg-type]
            return None
        return Match(node, x, weight, transposed=True)  # type: ignore[arg-type]


class Addmm(Rule):
    """``torch.addmm(bias, x, p)``: GPT-2's Conv1D."""

    pattern: ClassVar[str] = "linear"

    def match(self, node: fx.Node) -> Match | None:
        call = Call.read(node)
        if call is None or call.name != "addmm":
            return None
        bias, x, weight = (call.operands.get(name) for name in ("input", "mat1", "mat2"))
        if not (is_tensor(bias) and _of_activation(x, weight)):
            return None
        factors = ((option, factor) for option, factor in call.options.items() if factor != 1)
        unfit = tuple(Unfit(Refusal("addmm with %s=%s", *factor)) for factor in factors)
        return Match(node, x, weight, bias, transposed=True, parts=unfit)  # type: ignore[arg-type]


class Batched(Rule):
    """``torch.bmm(x, p)`` and ``x @ p`` with a (B, K, N) parameter: B linear layers, each with its own scales."""

    pattern: ClassVar[str] = "matmul"
    most: ClassVar[int] = 32  # each is three GEMMs and their casts, to compile and to launch

    def match(self, node: fx.Node) -> Match | None:
        x, weight = operands_of(node, "matmul", "bmm")
        if not _of_activation(x, weight):
            return None
        if value(x).dim() != 3 or value(weight).dim() != 3 or value(x).shape[0] != value(weight).shape[0]:  # type: ignore[arg-type]
            return None
        return Match(node, x, weight, transposed=True)  # type: ignore[arg-type]

    def check_form(self, match: Match) -> Refusal | None:
        batch = value(match.weight).shape[0]
        if not isinstance(batch, int) or batch > self.most:
            return Refusal("batched product of %s matrices, at most %d are unrolled", batch, self.most)
        return None

    def rewrite(self, match: Match, emit: Emit) -> None:
        aten, graph = torch.ops.aten, match.node.graph
        with graph.inserting_before(match.node):
            products = []
            for index in range(value(match.weight).shape[0]):
                x = graph.call_function(aten.select.int, (match.x, 0, index))
                weight = graph.call_function(aten.select.int, (match.weight, 0, index))
                weight = graph.call_function(aten.t.default, (weight,))
                products += emit([match], x, [weight])
            replace_layer(match, graph.call_function(aten.stack.default, (products,)))
