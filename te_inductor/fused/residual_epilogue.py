"""The pass that has a GEMM read what its output is added to: ``h = x + layer(y)`` becomes one GEMM that writes h.

Left alone, the kernel behind the GEMM, in transformers a norm's reduction, reads the output and the residual and writes
the sum: 6 bytes an element and the GEMM's 2. The GEMM reads the residual and writes the sum, which the norm reads: 6 in
all. It is done where CUTLASS's epilogue was measured to pay, and its sum is rounded once: docs/numerics.md.

Of training it is done on the joint graph, before it is cut into forward and backward: behind the cut the backward might
want the GEMM's own output, from which it would compute the sum again."""

import torch
from torch import fx

from te_inductor import ops
from te_inductor.fused.record import JOINT, POST_GRAD, FusedKernel
from te_inductor.kernels.problem import ANOTHER
from te_inductor.passes.graph.gemm_nodes import VIEWS, is_plain, kernel_of
from te_inductor.passes.graph.node_kinds import has_shape, tensor_of
from te_inductor.passes.graph.tracing import insert
from te_inductor.templates.cutlass import build

aten = torch.ops.aten


def fold(graph: fx.Graph) -> None:
    """Replace ``residual + output`` by `scaled_mm` with `added`."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        left, right = node.args
        if node.kwargs or not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            continue
        for output, residual in ((left, right), (right, left)):
            gemm = _product(output)
            if gemm is None or not has_shape(tensor_of(output), node.meta["val"].shape):
                continue
            if not _is_residual(residual, gemm, node) or not _alike(gemm, node):
                continue
            kernel = kernel_of(gemm, added=ANOTHER)
            if kernel is not None:  # it pays
                build.start([kernel])  # beside what is left of the compile
                _replace(node, output, gemm, residual)
                break


def _product(output: fx.Node) -> fx.Node | None:
    """The GEMM that `output` is, behind views, where nobody else reads it."""
    while len(output.users) == 1 and output.target in VIEWS:
        output = output.all_input_nodes[0]
    return output if len(output.users) == 1 and is_plain(output) else None


def _is_residual(x: fx.Node, gemm: fx.Node, total: fx.Node) -> bool:
    """Whether it is a tensor in memory, as an input of the graph is, and what others read as well; laid out as the
    GEMM's output."""
    value = tensor_of(x)
    if value is None or not has_shape(value, total.meta["val"].shape):
        return False
    alike = value.dtype == gemm.meta["val"].dtype and value.is_contiguous()
    return alike and (x.op == "placeholder" or len(x.users) > 1)


def _alike(gemm: fx.Node, total: fx.Node) -> bool:
    """Whether checkpoints treat both as one."""
    return all(gemm.meta.get(tag) == total.meta.get(tag) for tag in ("recompute", "ac_graph_id"))


def _replace(total: fx.Node, output: fx.Node, gemm: fx.Node, residual: fx.Node) -> None:
    graph, rows = total.graph, gemm.meta["val"].shape
    with graph.inserting_before(total):
        added = insert(graph, aten.view.default, residual, list(rows), like=total.meta)
        whole = graph.call_function(ops.scaled_mm, (*gemm.args[:7], None, added))
        whole.meta = {**total.meta, "val": gemm.meta["val"]}
        new = insert(graph, aten.view.default, whole, list(total.meta["val"].shape), like=total.meta)
    total.replace_all_uses_with(new)
    graph.erase_node(total)
    while not output.users:  # the GEMM, and views behind it
        output, unused = output.all_input_nodes[0], output
        graph.erase_node(unused)


KERNEL = FusedKernel((JOINT, POST_GRAD), fold)  # `scaled_mm` with `added`
