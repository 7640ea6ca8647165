"""Calls that are one node of a Dynamo graph and hide linear layers: `F.multi_head_attention_forward`, which
`nn.MultiheadAttention` calls, and the fast path that `nn.TransformerEncoderLayer` takes in evaluation without
gradients. `inline` puts their bodies in their places, as ATen ops, so that the rules see those layers."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from te_inductor.passes.graph.tracing import as_traced, lay_in
from te_inductor.passes.graph.values import is_tensor, is_wrapped, value

_PADDING = 1  # the fast path's mask_type of a mask (batch, length)


@dataclass(frozen=True)
class _InlinedCall:
    """What such a node computes; and, by the place and name of their weights, where its layers are in the module that
    calls it."""

    body: Callable[..., Any]
    layers: Mapping[tuple[int, str], tuple[str, ...]]

    def paths(self, node: fx.Node) -> dict[Any, tuple[str, ...]]:
        given = {
            node.args[place] if place < len(node.args) else node.kwargs.get(name): path
            for (place, name), path in self.layers.items()
        }
        return {weight: path for weight, path in given.items() if isinstance(weight, fx.Node)}


def _encoder_layer(
    src: Tensor,  # (batch, length, embed_dim)
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,  # (batch, length), or ((batch, num_heads,) length, length); 0 where attended to
    mask_type: int | None = None,
) -> Tensor:
    """`torch._transformer_encoder_layer_fwd`, as `nn.TransformerEncoderLayer` computes it elsewhere."""
    padding = mask is not None and mask_type == _PADDING
    hidden = None if mask is None else (mask.flatten(0, 1) if mask.dim() == 4 else mask).bool()
    masks = {"key_padding_mask": hidden if padding else None, "attn_mask": None if padding else hidden}
    given = (embed_dim, num_heads, qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias)

    def attended(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(x, x, x, *given, False, need_weights=False, **masks)  # type: ignore[arg-type]
        return y.transpose(0, 1)

    def first_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def fed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attended(first_norm(src))
        return x + fed_forward(second_norm(x))
    x = first_norm(src + attended(src))
    return second_norm(x + fed_forward(x))


_CALLS: dict[Any, _InlinedCall] = {
    F.multi_head_attention_forward: _InlinedCall(
        F.multi_head_attention_forward, {(11, "out_proj_weight"): ("out_proj",)}
    ),
    torch._transformer_encoder_layer_fwd: _InlinedCall(
        _encoder_layer,
        {
            (3, "qkv_weight"): ("self_attn",),
            (5, "proj_weight"): ("self_attn", "out_proj"),
            (14, "ffn_weight_1"): ("linear1",),
            (16, "ffn_weight_2"): ("linear2",),
        },
    ),
}


def inline(graph: fx.Graph) -> None:
    """Replace every such node of `graph` by what it computes."""
    for target, call in _CALLS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            # A symbolic number among the inputs (torch.compile(dynamic=True) makes one of the dropout probability)
            # would have to be guarded upon; Dynamo's guards are closed by now.
            known = all(is_tensor(item) and not value(item).is_nested for item in node.all_input_nodes)
            single = is_tensor(node)
            if (
                known
                and not is_wrapped(node)
                and (single or all(user.target is operator.getitem for user in node.users))
            ):
                _inline(node, call, single)
                graph.erase_node(node)


def _inline(node: fx.Node, call: _InlinedCall, single: bool) -> None:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(item for item in flat if is_tensor(item)))  # once each: the body asks `query is key`

    def body(*tensors: torch.Tensor) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([known[item] if item in inputs else item for item in flat], spec)
        return call.body(*args, **kwargs)

    fakes = [value(item) for item in inputs]
    output = value(node) if single else node.meta["example_value"][0]
    with as_traced(output, fakes):
        traced = make_fx(body, pre_dispatch=True)(*fakes)
        values = _Values(traced)
        values.run(*fakes)
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(traced.graph, copies)
    paths = call.paths(node)
    for old, new in copies.items():
        if old.op != "placeholder":
            new.meta = _meta(node, new, values.of[old], paths)
    made = [results] if single else results
    outputs = [node.meta["example_value"]] if single else node.meta["example_value"]
    for result, output in zip(made, outputs, strict=True):
        if is_tensor(result):
            lay_in(output, result, copies.values())
    if single:
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)


class _Values(fx.Interpreter):
    """Keeps the fake value of every node, with its requires_grad, which make_fx's own record lacks."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n] = super().run_node(n)
        return self.of[n]


def _meta(node: fx.Node, new: fx.Node, example: Any, paths: Mapping[Any, tuple[str, ...]]) -> dict[str, Any]:
    """The meta that Dynamo would have written: the value, and the module path, which for a layer may be that of a
    module within."""
    meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in node.meta}
    stack = meta.get("nn_module_stack")
    if stack and new.target is torch.ops.aten.linear.default and new.args[1] in paths:
        path, within = list(stack.values())[-1][0], paths[new.args[1]]
        meta["nn_module_stack"] = {**stack, within[-1]: (".".join((path, *within)), torch.nn.Linear)}
    return meta | {"example_value": example}
