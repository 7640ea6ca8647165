"""fp32 totals of weight gradients, to which a compiled graph's backward adds: Megatron's `main_grad`.

# Note [Gradients that are added in the backward]
With ``options={"wgrad": "main_grad"}`` a weight's gradient leaves its GEMM in fp32 and is added to
``parameter.main_grad``; autograd gets none, so that `parameter.grad` stays as it was, and hooks run and see no
gradient. Over several microbatches nothing is rounded to the parameter's dtype on the way, and no gradient in it is
kept. Who owns a `main_grad` zeroes it, at any time but during a backward. Where the parameter has
`grad_added_to_main_grad`, by which Megatron's hooks know, a forward that will have a backward sets it, unless the graph
leaves a part of the gradient to autograd, as of an embedding that is tied to the output layer. Where the embedding is in
another graph, or in none, its gradient clears the flag when it comes, before hooks see it. (Compiled autograd, which
does not say whose hook it runs, knows of graphs' own parts alone.)"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from te_inductor.errors import MainGradError
from te_inductor.runtime.extra_inputs import Takers

_FLAG = "grad_added_to_main_grad"


def checked(parameter: Tensor) -> Tensor:
    """A parameter's `main_grad`.

    Raises:
        MainGradError: a parameter has no total, or one that a GEMM cannot be added to.
    """
    total = getattr(parameter, "main_grad", None)
    if not isinstance(total, Tensor):
        raise MainGradError(
            f"a parameter of shape {tuple(parameter.shape)} has lost its main_grad, expected the fp32 tensor that it"
            " had"
            ' when it was compiled; set it, or compile with options={"wgrad": "grad"}'
        )
    fits = total.shape == parameter.shape and total.device == parameter.device and total.is_contiguous()
    if not fits or total.dtype != torch.float32:
        raise MainGradError(
            f"main_grad is {total.dtype} of shape {tuple(total.shape)} and strides {total.stride()} on {total.device},"
            f" expected torch.float32 of shape {tuple(parameter.shape)}, contiguous, on {parameter.device};"
            " torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format) is one"
        )
    return total


_WATCHED = "te_inductor.main_grads"  # in the metadata of the node that accumulates a gradient


def watch(parameters: Iterable[Tensor]) -> None:
    """Clear the flags of parameters for which autograd has a gradient too, in the backward of what has just run."""
    for parameter in parameters:
        if getattr(parameter, _FLAG, False) and parameter.requires_grad:
            node: Any = get_gradient_edge(parameter).node  # alive as long as a graph holds it
            if _WATCHED not in node.metadata:
                node.metadata[_WATCHED] = True
                node.register_prehook(_clear_flag)


def _clear_flag(gradients: tuple[Tensor | None, ...]) -> None:
    node: Any = torch._C._current_autograd_node()
    if node is not None and gradients[0] is not None and node.variable.grad is not node.variable.main_grad:
        setattr(node.variable, _FLAG, False)


def _total(parameter: Tensor, whole: bool) -> Tensor:
    """The total of a call, which will have a backward where gradients are enabled: the same memory with a version
    counter of the call's own, so that no backward minds that another one, or the user, has written there since its
    forward.

    Raises:
        MainGradError: as above.
    """
    if whole and torch.is_grad_enabled() and hasattr(parameter, _FLAG):
        setattr(parameter, _FLAG, True)
    return checked(parameter).data


def _example(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)


MAIN_GRADS = Takers("te_total_", _example, _total, watch)
