"""The sinks of weight gradients besides autograd: fp32 totals, Note [Gradients that are added in the backward], and GEMMs
that wait for `backward_dw`, Note [Weight gradients that wait]."""

from collections.abc import Sequence

from torch import Tensor

from te_inductor.ops.gemm import accumulate_wgrad, defer_wgrad, operands_of
from te_inductor.ops.grouped import accumulate_grouped_wgrad
from te_inductor.ops.layers.parts import GradientSink, WeightGradient
from te_inductor.recipes.constants import constant
from te_inductor.runtime.gradients.deferred_wgrads import TICKETS
from te_inductor.runtime.gradients.main_grads import MAIN_GRADS


@constant
class MainGrad(GradientSink):
    """The sink whose tensors are the totals, each of its weight's shape."""

    takers = MAIN_GRADS

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        gemm, starts = gradient.gemm, gradient.starts
        *operands, alpha = operands_of(gradient.a, gradient.b, gemm)
        if starts is None:
            accumulate_wgrad(tensors, *operands, alpha, gemm)
        else:
            accumulate_grouped_wgrad(tensors, *operands, starts, alpha, gemm)
        return [None] * len(gradient.sizes)


@constant
class Deferred(GradientSink):
    """The sink whose tensors are tickets, each () int64, a number that stands for the weight's parameter."""

    takers = TICKETS

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        *operands, alpha = operands_of(gradient.a, gradient.b, gradient.gemm)
        defer_wgrad(tensors, *operands, gradient.starts, alpha, gradient.gemm)
        return [None] * len(gradient.sizes)
