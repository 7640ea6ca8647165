"""Recurrent layers, and their cells, which are one node each. A step waits for the one before it and multiplies few rows,
which no recipe is for: the report names the layer and counts its FLOPs."""

from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.diagnostics import Outside
from te_inductor.passes.graph.values import is_tensor, value

NAMES = frozenset(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()  # as torch._VF has them
)
OUTSIDE = Outside("no recipe is for a recurrent layer, each step of which waits for the one before it")


def operands(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The input (..., K) of a recurrent layer, and its weights (N, K), each of which multiplies as many rows."""
    x, *others = node.args
    given = pytree.tree_leaves(others[1:])  # behind the state, or the lengths and states of 3 dimensions
    weights = [one for one in given if is_tensor(one) and value(one).dim() == 2]
    return (x, weights) if is_tensor(x) and weights else None
