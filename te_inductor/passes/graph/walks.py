"""Walks from node to node."""

from collections.abc import Callable, Iterable

from torch import fx


def back_past(node: fx.Node, passes: Callable[[fx.Node], bool]) -> fx.Node:
    """The first node in front of some, with it, that is none of these, each of which has one input that counts."""
    while passes(node):
        node = node.all_input_nodes[0]
    return node


def reached(starts: Iterable[fx.Node], follow: Callable[[fx.Node], Iterable[fx.Node]]) -> dict[fx.Node, None]:
    """The nodes that some lead to, with them; each is asked once where it leads."""
    found = dict.fromkeys(starts)
    pending = list(found)
    while pending:
        new = dict.fromkeys(one for one in follow(pending.pop()) if one not in found)
        found |= new
        pending += new
    return found
