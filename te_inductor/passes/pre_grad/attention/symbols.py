"""Symbolic sizes, as a graph's inputs have them: a mask is computed in front of the tensors that it is for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from te_inductor.passes.pre_grad.attention.expressions import Expr, expression


class Symbols:
    """The inputs of a graph that have its symbols: as its value, or as one of its sizes."""

    def __init__(self, root: fx.Graph) -> None:
        self._sources: dict[Expr, tuple[fx.Node, int | None]] = {}
        for node in root.find_nodes(op="placeholder"):
            given = node.meta.get("example_value")
            sizes: Mapping[int | None, Any] = {None: given}
            if isinstance(given, torch.Tensor):
                sizes = {} if given.is_nested else dict(enumerate(given.shape))
            for dim, size in sizes.items():
                if isinstance(size, torch.SymInt) and expression(size).is_Symbol:
                    self._sources.setdefault(expression(size), (node, dim))

    def missing(self, expressions: Iterable[Expr]) -> list[Expr]:
        """The symbols in some expressions that no input has."""
        return sorted(_symbols(expressions) - self._sources.keys(), key=str)

    def operands(self, expressions: Iterable[Expr]) -> list[fx.Node]:
        """The inputs from which they are computed."""
        return list(dict.fromkeys(self._sources[symbol][0] for symbol in sorted(_symbols(expressions), key=str)))

    def values(self, expressions: Sequence[Expr], given: Sequence[Any]) -> list[Any]:
        """The values of expressions, from those of their operands."""
        inputs = dict(zip(self.operands(expressions), given, strict=True))
        env = {}
        for symbol in _symbols(expressions):
            node, dim = self._sources[symbol]
            env[symbol] = inputs[node] if dim is None else inputs[node].shape[dim]
        return [
            int(one) if one.is_Integer else sympy_interp(PythonReferenceAnalysis, env, one)  # type: ignore[arg-type]
            for one in expressions
        ]


def _symbols(expressions: Iterable[Expr]) -> set[Expr]:
    return set[Expr]().union(*(sympy.sympify(one).free_symbols for one in expressions))
