"""The pass that has a GEMM write the FP8 copy that the next layer reads: ``quantize(activation(layer(x)))`` in one
kernel.

Left alone, the GEMM writes bf16 and a kernel reads it, computes the activation and writes the copy: 5 bytes an element
where the GEMM alone writes 1. The scale has to be known before the GEMM runs, and nobody else may want what lies
between: delayed scaling without gradients, and not in grad mode, where it records amaxes. It is done where CUTLASS's
epilogue was measured to pay. The epilogue rounds as the two kernels do: docs/numerics.md."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config, ir
from torch._inductor.lowering import lowerings

from te_inductor import ops
from te_inductor.fused.record import POST_GRAD, FusedKernel
from te_inductor.kernels.cutlass_tiles import ROUNDED, Kernel
from te_inductor.lowerings.casts import quantize
from te_inductor.lowerings.gemm import cutlass_choices, scaled_mm
from te_inductor.numerics.activation import OPS, Activation, evaluate
from te_inductor.numerics.scaled_products import ScaledProduct, transposed
from te_inductor.ops import flops
from te_inductor.ops.casts import copy_like
from te_inductor.ops.gemm import product_like
from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.graph.gemm_nodes import is_plain, is_step, kernel_of, translated
from te_inductor.passes.graph.tracing import insert
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import dense
from te_inductor.templates.cutlass import build

aten = torch.ops.aten


def _eager(
    a: Tensor,  # as `scaled_mm` has them
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    out_dtype: torch.dtype,  # that the product is rounded to
    activation: Activation,
    scale: Tensor,  # (), of the copy
    quantizer: Quantizer,
) -> Tensor:  # (M, pad(N)), the row copy of the activation
    y = dense.scaled_mm(a, a_scale, b, b_scale, bias, gemm, out_dtype)
    return dense.quantize_delayed(activation.of(y), scale, quantizer)


quantized_mm = op_of(_eager, lambda *given: copy_like(product_like(*given[:7]), given[-1])[0], name="quantized_mm")
flops.counted(flops.of_gemm, quantized_mm)


def fold(graph: fx.Graph) -> None:
    """Replace a cast with a known scale, and what it is cast from, by `quantized_mm`."""
    if config.emulate_precision_casts:  # a rounding behind every op, which no epilogue does
        return
    for cast in graph.find_nodes(op="call_function", target=ops.quantize_delayed):
        between = _between(cast)
        if between and all(isinstance(size, int) for size in between[0].meta["val"].shape):
            gemm, *rest = between
            activation = _activation(cast, gemm, rest)
            if activation is None or not _is_whole(cast):
                continue
            kernel = _kernel(gemm, cast, activation)
            if kernel is not None:
                build.start([kernel])  # beside what is left of the compile
                _replace(cast, between, activation)


def _between(cast: fx.Node) -> list[fx.Node]:
    """The GEMM and all that is computed between it and the cast, in order, where nothing else goes in or comes out;
    else nothing."""
    inside, waiting = {cast}, [cast.args[0]]
    while waiting:
        node: Any = waiting.pop()
        if node not in inside:
            inside.add(node)
            if node.target is not ops.scaled_mm:
                if not is_step(node):
                    return []
                waiting += node.all_input_nodes
    ordered = [node for node in cast.graph.nodes if node in inside]
    *between, _ = ordered
    ours = sum(node.target is ops.scaled_mm for node in between) == 1 and is_plain(between[0])
    return between if ours and all(user in inside for node in between for user in node.users) else []


def _activation(cast: fx.Node, gemm: fx.Node, rest: list[fx.Node]) -> Activation | None:
    """What `rest` computes of each of the GEMM's values, if it is the last step's."""
    found = translated(rest, [gemm])
    if found is None or found[1][cast.args[0]] != len(found[0]):  # type: ignore[index]
        return None
    return Activation(found[0])


def _is_whole(cast: fx.Node) -> bool:
    """Whether the copy has no padding and one scale."""
    x, quantizer = cast.args[0].meta["val"], cast.args[2]  # type: ignore[union-attr]
    return quantizer.granularity.whole and cast.meta["val"].shape == x.shape  # type: ignore[union-attr]


def _kernel(gemm: fx.Node, cast: fx.Node, activation: Activation) -> Kernel | None:
    """None where it does not pay."""
    if gemm.meta["val"].dtype != ROUNDED:
        return None
    return kernel_of(gemm, cast.meta["val"].dtype, activation=activation)


def _replace(cast: fx.Node, between: list[fx.Node], activation: Activation) -> None:
    graph, gemm = cast.graph, between[0]
    with graph.inserting_before(cast):
        whole = graph.call_function(quantized_mm, (*gemm.args[:7], activation, *cast.args[1:]))  # type: ignore[arg-type]
        whole.meta = {**cast.meta, "val": cast.meta["val"].view(gemm.meta["val"].shape)}
        copy = insert(graph, aten.view.default, whole, list(cast.meta["val"].shape), like=cast.meta)
    cast.replace_all_uses_with(copy)
    for node in (cast, *reversed(between)):
        graph.erase_node(node)


def _lower(
    a: ir.TensorBox,  # as above
    a_scale: ir.TensorBox,
    b: ir.TensorBox,
    b_scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
    activation: Activation,
    scale: ir.TensorBox,  # ()
    quantizer: Quantizer,
) -> ir.TensorBox:
    turned = transposed(scaled_mm.MATRICES, b_scale)
    product = ScaledProduct(a, a_scale, b, turned, gemm, quantizer.format.dtype)
    copy = _by_cutlass(product, bias, activation, scale)
    if copy is not None:
        return copy
    y = lowerings[torch.ops.prims.convert_element_type.default](
        scaled_mm.scaled_mm(a, a_scale, b, b_scale, bias, gemm, out_dtype), torch.float32
    )
    functions = {name: lowerings[op] for name, op in OPS.items()}
    return quantize.quantize_delayed(evaluate(activation.steps, y, functions), scale, quantizer)  # type: ignore[no-any-return]


def _by_cutlass(
    product: ScaledProduct,  # whose output is FP8; its scales as `launch.scaled_mm` takes them
    bias: ir.TensorBox | None,
    activation: Activation,
    scale: ir.TensorBox,  # (), of the copy
) -> ir.TensorBox | None:  # (M, N)
    """The GEMM that writes the quantized activation of its sum; None where the table has no tile. Under max-autotune
    too."""
    if bias is not None and bias.get_dtype() != ROUNDED:
        return None
    a, _, b, _, gemm, out, _ = product
    problem = cutlass_choices.problem_of(a, b, bias, gemm, out, activation=activation)
    rest = [scale, *cutlass_choices.those(bias)]
    return cutlass_choices.with_more(cutlass_choices.QUANTIZED, problem, product[:4], rest, steps=activation.steps)


KERNEL = FusedKernel((POST_GRAD,), where_quantized(fold), quantized_mm, _lower)
