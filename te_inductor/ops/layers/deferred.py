"""Weight gradients whose GEMMs wait for `backward_dw`: Note [Weight gradients that wait]."""

from collections.abc import Sequence

from torch import Tensor

from te_inductor.ops.gemm import defer_wgrad, operands_of
from te_inductor.ops.layers.parts import GradientSink, WeightGradient
from te_inductor.recipes.constants import constant
from te_inductor.runtime.gradients.deferred_wgrads import TICKETS


@constant
class Deferred(GradientSink):
    """The sink whose tensors are tickets, each () int64, a number that stands for the weight's parameter."""

    takers = TICKETS

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        *operands, alpha = operands_of(gradient.a, gradient.b, gradient.gemm)
        defer_wgrad(tensors, *operands, gradient.starts, alpha, gradient.gemm)
        return [None] * len(gradient.sizes)
