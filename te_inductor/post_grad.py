"""The passes on Inductor's graphs, after autograd: one quantization of a tensor, however many GEMMs read it; sigmoids.py;
sines.py; residuals.py; quantized_outputs.py; few_queries.py.

AOTAutograd's partitioner removes common subexpressions from training graphs; inference graphs get none, so q, k and v
would each quantize the same input.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from te_inductor import few_queries, ops, quantized_outputs, residuals, sigmoids, sines
from te_inductor.errors import StateError
from te_inductor.templates import cutlass

aten = torch.ops.aten
_QUANTIZE = frozenset(
    {
        ops.quantize,
        ops.quantize_rowcol,
        ops.quantize_pieces,
        ops.hadamard,
        ops.tensor_amax,
        ops.current_scale,
        ops.quantize_delayed,
        ops.quantize_rowcol_delayed,
        ops.quantize_pieces_delayed,
    }
)
# Pure ops between a tensor and its quantized copies, with them.
_SHARED = _QUANTIZE | {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.permute.default,
    torch.ops.prims.convert_element_type.default,
}


class Pass(CustomGraphPass):  # type: ignore[misc]
    """A pass of ours where torch has room for one: it runs after the user's own, if there is one.

    Its `uuid` also stands in both compile caches for everything of ours that Inductor's key does not see: the lowerings, and
    whether CUTLASS is installed, and which.
    """

    def __init__(self, user_pass: Callable[[fx.Graph], Any] | None, ours: Callable[[fx.Graph], None]) -> None:
        self.user_pass, self.ours = user_pass, ours

    def __call__(self, graph: fx.Graph) -> None:
        if self.user_pass is not None:
            self.user_pass(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """None, which turns the cache off, where the user's pass has no identity."""
        ours = package_hash(), cutlass.identity()
        if self.user_pass is None:
            return ours
        theirs = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if theirs is None else (*ours, theirs)


class PostGrad(Pass):
    """Changes graphs that quantize or have stored weights, and no other."""

    def __init__(self, user_pass: Callable[[fx.Graph], Any] | None = None) -> None:
        super().__init__(user_pass, simplify)


def simplify(graph: fx.Graph) -> None:
    check_scales(graph)
    release_scales(graph)
    if any(node.target in _QUANTIZE for node in graph.nodes):
        share(graph)
        sigmoids.fold(graph)
        sines.keep(graph)
        residuals.fold(graph)
        quantized_outputs.fold(graph)
    few_queries.fold(graph)


def check_scales(graph: fx.Graph) -> None:
    """That no backward reads delayed scaling's scales for itself, which joint_graph.py has torch save: they would be the
    next step's.

    Raises:
        StateError: one does.
    """
    backward = any("tangent" in str(node.target) for node in graph.find_nodes(op="placeholder"))
    if backward and graph.find_nodes(op="call_function", target=ops.read_scales):
        raise StateError(
            "delayed scaling's scales are read again by the backward, behind the update of the step, expected those of its"
            " forward: torch's partitioner was told to save them and did not; set"
            " torch._functorch.config.activation_memory_budget = 1, or take a recipe without state"
        )


def release_scales(graph: fx.Graph) -> None:
    """The end of delayed scaling's step has the copies of its scales for the partitioner's sake (Note [A step under delayed
    scaling]). Inductor would make all weights' casts first for it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.args[0] is ops.update_scales and node.kwargs.get("read") is not None:
            node.update_kwarg("read", None)


def share(graph: fx.Graph) -> None:
    """Replace each repeated `_SHARED` node by the first."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SHARED:
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value


@functools.cache
def package_hash() -> str:
    """A digest of the package's sources: an edited package never meets kernels that an older one wrote."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(path for kind in ("*.py", "*.json") for path in root.rglob(kind)):  # and tuned tables
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
