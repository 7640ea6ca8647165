"""fp32 totals of weight gradients as inputs of a compiled graph, whose backward adds to them: Megatron's `main_grad`.

# Note [Gradients that are added in the backward]
With ``options={"wgrad": "main_grad"}`` a weight's gradient leaves its GEMM in fp32 and is added to
``parameter.main_grad``; autograd gets none, so that `parameter.grad` stays as it was and hooks on the gradient do not
run. Over several microbatches nothing is rounded to the parameter's dtype on the way, and no gradient in it is kept. Who
owns a `main_grad` zeroes it, at any time but during a backward. Where the parameter has `grad_added_to_main_grad`, by
which Megatron's hooks know, a forward that will have a backward sets it.

The graph takes ``main_grad.data``, the same memory with a version counter of its own: zeroing between forward and
backward is no error, and neither is the addition by another microbatch's backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_inductor.errors import MainGradError


@dataclass
class MainGradInputs:
    """Of all weights of a graph that have one, in the order of its inputs."""

    parameters: list[int] = field(default_factory=list)  # places among the graph's inputs
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input

    def of(self, inputs: Sequence[Any]) -> list[Tensor]:
        """What a call with these inputs takes besides.

        Raises:
            MainGradError: a parameter has no total, or one that a GEMM cannot be added to.
        """
        found = []
        for place in self.parameters:
            parameter = inputs[place]
            found.append(checked(parameter).data)
            if torch.is_grad_enabled() and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
        return found


def checked(parameter: Tensor) -> Tensor:
    """A parameter's `main_grad`.

    Raises:
        MainGradError: as above.
    """
    total = getattr(parameter, "main_grad", None)
    if not isinstance(total, Tensor):
        raise MainGradError(
            f"a parameter of shape {tuple(parameter.shape)} has lost its main_grad, expected the fp32 tensor that it had"
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
