"""The losses of tokens as programs write them, of logits that are given: cross entropy, and logarithms of probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.values import is_tensor, value

_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


@dataclass(frozen=True)
class Form:
    """A loss as it is written."""

    logits: Any  # (…, V)
    labels: Any  # (…), or (…, 1) where they are picked
    reduction: str = "none"  # or "mean", "sum"; "picked": the logarithms of the labels' probabilities
    ignored: Any = None
    smoothing: Any = 0.0
    own: tuple[fx.Node, ...] = ()  # the nodes that the form has in front of its last one, in the graph's order
    refusal: str | None = None


def form(call: fx.Node) -> Form | None:
    """The loss that a node computes, which is the last of its form."""
    if call.op == "call_function" and call.target in (F.cross_entropy, F.nll_loss):
        return _cross_entropy(call)
    read = _FORMS.get(operators.read(call).name)
    return None if read is None else read(call)


def _cross_entropy(call: fx.Node) -> Form | None:
    """Cross entropy, or the negative log-likelihood of a logarithm of softmax, of classes in the last dimension, or in
    the second one, where a permutation puts them there."""
    given = operators.arguments(call, *(_ARGUMENTS if call.target is F.cross_entropy else _ARGUMENTS[:-1]))
    logits, target = given["input"], given["target"]
    own: tuple[fx.Node, ...] = ()
    if call.target is F.nll_loss:
        logits, own = _of_softmax(logits), (logits,)
    if logits is None:
        return None
    refusal = "classes have weights" if given.get("weight") is not None else None
    if given.get("size_average") is not None or given.get("reduce") is not None:
        refusal = "it is reduced by 'size_average' or 'reduce', which torch deprecates"
    dims = value(logits).dim()
    if not own and operators.order(logits) == [0, dims - 1, *range(1, dims - 1)]:
        own = (logits,)
        [logits] = logits.all_input_nodes
    elif dims != 2:
        refusal = refusal or "its classes are neither the last dimension nor a permutation's second one"
    if not is_tensor(target) or value(target).dim() != dims - 1:
        refusal = refusal or "it has no label for each token"
    numbers = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    return Form(logits, target, given.get("reduction", "mean"), *numbers, own, refusal)


def _of_softmax(node: Any) -> Any:
    """What a logarithm of softmax over the last dimension is of."""
    if not is_tensor(node) or operators.read(node).name != "log_softmax":
        return None
    given = operators.arguments(node, "input", "dim")
    dtype, _ = given.pop("dtype", None), given.pop("_stacklevel", None)
    if given.keys() != {"input", "dim"} or given["dim"] not in (-1, value(node).dim() - 1):
        return None
    return given["input"] if dtype in (None, torch.float32) and is_tensor(given["input"]) else None


def _gathered(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The source and the index of what is picked along the last dimension."""
    if not is_tensor(node) or operators.read(node).name != "gather":
        return None
    given = operators.arguments(node, "input", "dim", "index")
    source, index = given.get("input"), given.get("index")
    if given.keys() - {"input", "dim", "index", "sparse_grad"}:  # a result that is written somewhere
        return None
    if not (is_tensor(source) and is_tensor(index)) or given.get("dim") not in (-1, value(source).dim() - 1):
        return None
    return source, index


def _of_last(node: Any, called: str) -> fx.Node | None:
    """What the last dimension, of one, was added to by `unsqueeze` or taken of by `squeeze`."""
    if not is_tensor(node) or operators.read(node).name != called:
        return None
    given = operators.arguments(node, "input", "dim")
    source = given.get("input")
    if given.keys() != {"input", "dim"} or not is_tensor(source):
        return None
    dims = value(source if called == "squeeze" else node).dim()
    return source if given["dim"] in (-1, dims - 1) else None


def _squeezed(node: Any) -> Any:
    """What a last dimension was taken of; the node itself where it was not."""
    return _of_last(node, "squeeze") or node


def _is_whole(source: fx.Node, index: fx.Node) -> bool:
    """Whether each token has one word picked."""
    picked = value(index)
    return picked.shape[-1:] == (1,) and picked.shape[:-1] == value(source).shape[:-1]


def _picked(call: fx.Node) -> Form | None:
    """``logits.log_softmax(-1).gather(-1, index)``."""
    found = _gathered(call)
    logits = None if found is None else _of_softmax(found[0])
    if found is None or logits is None:
        return None
    refusal = None if _is_whole(*found) else "it picks several words of a token"
    return Form(logits, found[1], "picked", own=(found[0],), refusal=refusal)


def _difference(call: fx.Node) -> Form | None:
    """``logits.gather(-1, index) - logits.logsumexp(-1)``, or the other way round; sums may be computed a row at a
    time."""
    operands: tuple[Any, ...] = call.args
    if len(operands) != 2 or call.kwargs or not all(is_tensor(one) for one in operands):
        return None
    for picks, sums, reduction in ((*operands, "picked"), (*reversed(operands), "none")):
        gathered, summed = _gathered(_squeezed(picks)), log_sums(sums)
        if gathered is None or summed is None or gathered[0] is not summed[0]:
            continue
        if value(picks).shape != value(sums).shape or not _is_whole(*gathered):
            return None
        own = {_squeezed(picks), picks, *summed[1]}
        return Form(*gathered, reduction, own=tuple(sorted(own)))
    return None


def log_sums(node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """What `logsumexp` over the last dimension is of, and the nodes that compute it: one, or one a row and a stack of
    those."""
    pieces = _stacked(node)
    if pieces is not None:
        found = [log_sums(one) for one in pieces]
        rows = [None if one is None else one[0] for one in found]
        whole = _of_rows(rows)
        return None if whole is None else (whole, (*rows, *pieces, node))  # type: ignore[arg-type]
    if not is_tensor(node) or operators.read(node).name != "logsumexp":
        return None
    given = operators.arguments(node, "input", "dim", "keepdim")
    source, dims = given.get("input"), given.get("dim")
    if given.keys() - {"input", "dim", "keepdim"}:
        return None
    [dim] = dims if isinstance(dims, list | tuple) and len(dims) == 1 else [dims]
    return (source, (node,)) if is_tensor(source) and dim in (-1, value(source).dim() - 1) else None


def _stacked(node: Any) -> list[Any] | None:
    """The tensors that are stacked along a new first dimension."""
    if not is_tensor(node) or operators.read(node).name != "stack" or node.args[1:] not in ((), (0,)):
        return None
    pieces = node.args[0] if node.args else None
    return list(pieces) if isinstance(pieces, list | tuple) and node.kwargs in ({}, {"dim": 0}) else None


def _of_rows(rows: list[Any]) -> fx.Node | None:
    """The tensor that these are all rows of, in order."""
    whole = None
    for place, row in enumerate(rows):
        if not is_tensor(row) or operators.read(row).name != "getitem" or row.args[1] != place:
            return None
        if not isinstance(row.args[1], int) or whole not in (None, row.args[0]):
            return None
        whole = row.args[0]
    return whole if is_tensor(whole) and value(whole).shape[0] == len(rows) else None


def _row_by_row(call: fx.Node) -> Form | None:
    """``stack([row.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1) for row, label in zip(logits, labels)])``."""
    rows, labels, own = [], [], set()
    for piece in _stacked(call) or ():
        found = _gathered(_squeezed(piece))
        logits = None if found is None else _of_softmax(found[0])
        if found is None or logits is None or _squeezed(piece) is piece or not _is_whole(*found):
            return None
        rows.append(logits)
        labels.append(_of_last(found[1], "unsqueeze"))
        own |= {logits, found[0], _squeezed(piece), piece}
    whole, label = _of_rows(rows), _of_rows(labels)
    return None if whole is None or label is None else Form(whole, label, "picked", own=tuple(sorted(own)))


_FORMS: dict[str, Callable[[fx.Node], Form | None]] = {
    "gather": _picked, "sub": _difference, "stack": _row_by_row,
}  # fmt: skip
