"""Sums and pieces over a process group. Results are waited for."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from te_inductor.ops.differentiable import Gradients, Needs, Operation


@dataclass(frozen=True)
class AllReduce(Operation):
    """The sum of x over a process group; the gradient, which all ranks have, goes to each."""

    group: Any  # a ProcessGroup, or its name

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", self.group)), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        pass

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return grads


@dataclass(frozen=True)
class AllGather(Operation):
    """The x (R, …) of all ranks, one below the other; of the gradients, the sum of this rank's rows."""

    group: Any

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return _gathered(x, self.group), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        pass

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (_scattered(grads[0], self.group),)


@dataclass(frozen=True)
class ReduceScatter(Operation):
    """This rank's rows of the sum of all ranks' x (ranks * R, …); its gradient is gathered."""

    group: Any

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return _scattered(x, self.group), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        pass

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return (_gathered(grads[0], self.group),)


def _gathered(x: Tensor, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), 0, group))


def _scattered(x: Tensor, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", 0, group))
