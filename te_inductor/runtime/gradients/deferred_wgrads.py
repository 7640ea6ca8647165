"""Weight gradients whose GEMMs do not run in the backward, but when `backward_dw` is called.

# Note [Weight gradients that wait]
With ``options={"wgrad": "deferred"}`` a compiled backward computes dgrad, and leaves what wgrad needs, the columnwise
copies of dy and x, with the parameter. `backward_dw` multiplies them and adds the product to ``parameter.main_grad``
where there is one, else to ``parameter.grad``: what the backward would have left there, later. So a pipeline sends dx
on first, and fills its bubbles with wgrads.

The op `defer_wgrad` keeps tensors that the graph's code made. Inductor knows nothing of that and would write other
tensors in their memory; its lowering (lowerings/gemm/weight_grads.py) forbids it, and the op's eager kernel copies
them. In a CUDA graph's memory the next replay writes, whatever anyone forbids, so there sites are refused.

A graph knows a parameter by its ticket, a number that is an input like `main_grad`. It is a tensor that the op says it
changes, which keeps the op in the graph, and in its place among others.

Who forgets the call has no gradients, and would not know. So while products wait, `step` of an optimizer that has one
of their parameters is an error. `zero_grad`, of an optimizer or a module, throws its parameters' products away with the
gradients of the same backwards. Who sets a gradient to None or to zero by hand tells nobody. So a backward that leaves
products also leaves a gradient of zeros with each parameter that has neither a `grad` nor a `main_grad`, and notes which
tensor stands there and how often it was written. The next backward that leaves a product of the parameter, before it
accumulates anything there, and `backward_dw` and an optimizer's step look what has become of it. Where it is None, what
waits is thrown away, as autograd's part is. Where it was written since, or is another tensor, and all zeros, that is an
error: a program that has scaled what was zero would lose the gradient."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import Optimizer

from te_inductor import compat
from te_inductor.errors import DeferredWgradError, wrong_type
from te_inductor.recipes.quantizers import Gemm
from te_inductor.runtime.eager import Written, dense
from te_inductor.runtime.extra_inputs import Takers
from te_inductor.runtime.gradients.main_grads import checked
from te_inductor.runtime.hooks import check_before_each
from te_inductor.tensor_tables import TensorReference, TensorTable


@dataclass(eq=False)
class WaitingProduct:
    """One GEMM that waits, of one parameter or of several whose weights are one."""

    place: int  # among all that were ever deferred
    backward: int  # torch's number of the backward that left it
    parameters: list[TensorReference]
    wanted: list[bool]  # which of them that backward accumulates into
    operands: Sequence[Tensor]  # dy columnwise (N, M), scale_inv; x columnwise (K, M), scale_inv
    alpha: Tensor | None  # (), of two-level scales
    gemm: Gemm
    starts: Tensor | None = None  # (E + 1,), where each group of columns begins, of experts
    emptied: list[Tensor] = field(
        default_factory=list
    )  # () bool each, whether what it is to be added to was set to zero

    def receivers(self) -> Iterator[Tensor | None]:
        return (ref() for ref, wanted in zip(self.parameters, self.wanted, strict=True) if wanted)

    def run(self) -> None:
        parameters = [parameter for ref in self.parameters if (parameter := ref()) is not None]
        if len(parameters) < len(self.parameters):
            return  # nobody is left to ask for it
        own = not any(_has_total(one) or _grad_dtype(one) != one.dtype for one in parameters)
        dtype = parameters[0].dtype if own else torch.float32
        a, a_scale, b, b_scale = self.operands
        if self.starts is None:
            dw = dense.scaled_mm(a, a_scale, b, b_scale, None, self.gemm, dtype, self.alpha)
        else:
            dw = torch.ops.te_inductor.grouped_wgrad(a, a_scale, b, b_scale, self.starts, self.gemm, dtype, self.alpha)
        one_each = dw.dim() > parameters[0].dim()  # a parameter an expert
        gradients = dw.unbind() if one_each else dw.split([parameter.shape[-2] for parameter in parameters], -2)
        for parameter, wanted, gradient in zip(parameters, self.wanted, gradients, strict=True):
            if wanted:
                _accumulate(parameter, gradient)


@dataclass(frozen=True)
class Standing:
    """What products are to be added to, as the last backward that left one has left it."""

    tensor: TensorReference  # a parameter's `main_grad`, or its `grad`
    written: int  # how often
    is_total: bool

    @staticmethod
    def of(parameter: Tensor) -> "Standing | None":
        tensor, is_total = _taker(parameter)
        return None if tensor is None else Standing(TensorReference(tensor), tensor._version, is_total)

    def is_left(self, tensor: Tensor | None) -> bool:
        return tensor is not None and self.written == tensor._version and self.tensor.is_to(tensor)


@dataclass(eq=False)
class Queue:
    """What waits for one parameter, or for it and others."""

    parameter: TensorReference
    ticket: Tensor  # () int64, on the CPU
    products: list[WaitingProduct] = field(default_factory=list)
    standing: Standing | None = None


_queues: TensorTable["Queue"] = TensorTable()  # by the parameter, with which they die
_by_ticket: "weakref.WeakValueDictionary[int, Queue]" = weakref.WeakValueDictionary()
_tickets, _places = itertools.count(), itertools.count()


def _ticket(parameter: Tensor, _: bool = True) -> Tensor:
    queue = _queues.get(parameter, None)
    if queue is None:
        number = next(_tickets)
        queue = _queues[parameter] = _by_ticket[number] = Queue(
            TensorReference(parameter), torch.tensor(number, dtype=torch.int64, device="cpu")
        )
    return queue.ticket.data


TICKETS = Takers("te_ticket_", lambda parameter: torch.empty((), dtype=torch.int64, device="cpu"), _ticket)


def defer_wgrad(
    tickets: list[Written],  # of the parameters, each () int64
    a: Tensor,  # dy columnwise, (N, M); of experts (N, P), groups padded
    a_scale: Tensor,
    b: Tensor,  # x columnwise, (K, M), or (K, P)
    b_scale: Tensor,
    starts: Tensor | None,  # (E + 1,), of experts
    alpha: Tensor | None,  # ()
    gemm: Gemm,
    copy: bool = True,  # where nobody keeps the operands' memory from being written
) -> None:
    """Leave a product for `backward_dw`. Does nothing where a parameter is gone, or none is accumulated into."""
    queues = [queue for ticket in tickets if (queue := _by_ticket.get(int(ticket))) is not None]
    wanted = [_is_accumulated(queue.parameter()) for queue in queues]
    if len(queues) < len(tickets) or not any(wanted):
        return
    operands: list[Any] = [a, a_scale, b, b_scale, starts, alpha]
    if copy:
        operands = [None if x is None else x.clone() for x in operands]
    *operands, starts, alpha = operands
    backward, refs = torch._C._current_graph_task_id(), [queue.parameter for queue in queues]
    product = WaitingProduct(next(_places), backward, refs, wanted, operands, alpha, gemm, starts)
    running = _running_of(backward) if backward >= 0 else _Running()
    _look(queue for queue in queues if queue not in running.queues)
    queues[0].products.append(product)
    running.left.append((queues[0], product))
    running.queues.update(dict(zip(queues, wanted, strict=True)))
    if backward < 0:
        running()
    check_before_each(_refuse_step)


class _Running:
    """A backward that leaves products. torch calls it when that has ended, and lets go of it where that has failed: what
    it has left goes with it, as a program that goes on does so without gradients of it."""

    def __init__(self) -> None:
        self.left: list[tuple[Queue, WaitingProduct]] = []
        self.queues: dict[Queue, bool] = {}  # of the parameters, with whether it accumulates into one

    def __call__(self) -> None:
        for queue, wanted in self.queues.items():
            parameter = queue.parameter()
            if parameter is not None:
                if wanted and _taker(parameter)[0] is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
                queue.standing = Standing.of(parameter)
        self.left, self.queues = [], {}

    def __del__(self) -> None:
        for queue, product in self.left:
            if product in queue.products:
                queue.products.remove(product)


_running: "weakref.WeakValueDictionary[int, _Running]" = weakref.WeakValueDictionary()  # by torch's number


def _running_of(backward: int) -> _Running:
    """The backward that runs."""
    running = _running.get(backward)
    if running is None:
        running = _running[backward] = _Running()
        torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]
    return running


def product_of(
    parameters: Sequence[Tensor],  # one (E, N, K), or E of (N, K)
    operands: Sequence[Tensor],
    starts: Tensor | None,
    alpha: Tensor | None,
    gemm: Gemm,
) -> WaitingProduct | None:
    """One that waits for whom the caller says, if the backward that runs accumulates into any of the parameters."""
    wanted = [_is_accumulated(parameter) for parameter in parameters]
    if not any(wanted):
        return None
    backward, refs = torch._C._current_graph_task_id(), [TensorReference(parameter) for parameter in parameters]
    return WaitingProduct(next(_places), backward, refs, wanted, operands, alpha, gemm, starts)


def _is_accumulated(parameter: Tensor | None) -> bool:
    """Whether the backward that runs leaves gradients with the parameter: that of torch.autograd.grad does not, and one
    that is given `inputs` does with those."""
    if parameter is None or not parameter.requires_grad:
        return False
    if torch._C._current_graph_task_id() < 0:
        return True  # nobody's backward
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:  # torch's answer where torch.autograd.grad was asked for a leaf
        return False


def backward_dw(model: nn.Module | None = None, *, backwards: int | None = None) -> int:
    """Run the weight gradients that ``options={"wgrad": "deferred"}`` left, oldest first, and add each to its
    parameter's `main_grad` where there is one, else to its `grad`. No hooks run here: those on the gradient ran in the
    backward, and saw none.

    Args:
        model: whose parameters' alone; None: all that wait.
        backwards: those of so many of the oldest backward passes among them; None: all.

    Returns:
        How many GEMMs ran.

    Raises:
        DeferredWgradError: an argument is something else, or what a gradient is to be added to was set to zero since.
        MainGradError: a parameter's `main_grad` does not fit it.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise DeferredWgradError(wrong_type("model", model, "the nn.Module whose weight gradients wait, or None"))
    if backwards is not None and (not isinstance(backwards, int) or isinstance(backwards, bool) or backwards < 0):
        raise DeferredWgradError(wrong_type("backwards", backwards, "a number of backward passes, or None"))
    _look(_queues.values())
    chosen = _waiting(None if model is None else model.parameters())
    if backwards is not None:
        oldest = list(dict.fromkeys(product.backward for _, product in chosen))[:backwards]
        chosen = [(queue, product) for queue, product in chosen if product.backward in oldest]
    if emptied := sum(any(map(bool, product.emptied)) for _, product in chosen):
        raise DeferredWgradError(
            f"{emptied} of {len(chosen)} weight gradients that wait are of parameters whose main_grad or grad the program"
            " has set to zero since, or scaled while it was zero, expected it as the backward has left it; call"
            " te_inductor.backward_dw(model) before that, or zero_grad() of the optimizer or the model, which throws away"
            " what waits too"
        )
    for queue, product in chosen:
        with torch.no_grad():
            product.run()
        queue.products.remove(product)
    return len(chosen)


compat.never_compile(backward_dw, with_calls=True)  # a whole step may be compiled


def _waiting(parameters: Iterable[Tensor] | None) -> list[tuple[Queue, WaitingProduct]]:
    """What waits for any of these, or at all, oldest first."""
    found = [(queue, product) for queue in _queues.values() for product in queue.products]
    if parameters is not None:
        ids = {id(parameter) for parameter in parameters}
        found = [one for one in found if any(id(parameter) in ids for parameter in one[1].receivers())]
    return sorted(found, key=lambda one: one[1].place)


def _look(queues: Iterable[Queue]) -> None:
    """Finds what has become of what products are to be added to, and lets those go whose `grad` is None now."""
    for queue in queues:
        parameter, left = queue.parameter(), queue.standing
        if parameter is None or left is None:
            continue
        tensor, is_total = _taker(parameter)
        if left.is_left(tensor):
            continue
        queue.standing = Standing.of(parameter)
        waiting = _waiting([parameter]) if is_total == left.is_total else []
        if waiting and tensor is None:
            _forget([parameter])
        elif waiting and tensor is not None:
            emptied = tensor.any().logical_not()  # which no backward waits for
            for _, product in waiting:
                product.emptied.append(emptied)


def _forget(parameters: Iterable[Tensor]) -> None:
    """Lets gradients go with those that were thrown away. A product of several parameters stays for the others."""
    if not any(queue.products for queue in _queues.values()):
        return
    ids = {id(parameter) for parameter in parameters}
    for queue, product in _waiting(None):
        kept = [id(ref()) not in ids for ref in product.parameters]
        product.wanted = [wanted and keep for wanted, keep in zip(product.wanted, kept, strict=True)]
        if not any(product.wanted):
            queue.products.remove(product)


compat.after_zero_grad(_forget)


def _refuse_step(optimizer: Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _look(queue for parameter in parameters if (queue := _queues.get(parameter, None)) is not None)
    waiting = _waiting(parameters)
    if waiting:
        raise DeferredWgradError(
            f"the optimizer's step finds {len(waiting)} weight gradients that have not been computed, expected none;"
            ' options={"wgrad": "deferred"} wants te_inductor.backward_dw(model) between backward and step'
        )


def _taker(parameter: Tensor) -> tuple[Tensor | None, bool]:
    """What a parameter's gradient is added to, if it is there, and whether that is its `main_grad`.

    Raises:
        MainGradError: it is one that does not fit.
    """
    return (checked(parameter), True) if _has_total(parameter) else (parameter.grad, False)


def _has_total(parameter: Tensor) -> bool:
    return isinstance(getattr(parameter, "main_grad", None), Tensor)


def _grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's gradients; its own, where it takes any, as what a GEMM of that would be."""
    return parameter.grad_dtype or parameter.dtype


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulates as autograd would, or as Megatron's convention has it."""
    if _has_total(parameter):
        total = checked(parameter).add_(gradient)
        apart = parameter.grad is not None and parameter.grad is not total  # autograd's part of it
        if hasattr(parameter, "grad_added_to_main_grad") and not apart:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    elif parameter.grad is None:
        parameter.grad = gradient.to(_grad_dtype(parameter))
    else:
        parameter.grad.add_(gradient.to(_grad_dtype(parameter)))
    if (queue := _queues.get(parameter, None)) is not None:
        queue.standing = Standing.of(parameter)
