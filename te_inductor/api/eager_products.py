"""Matrix products with a weight that run eagerly, outside of every compiled graph: what no compiler could have told of.

# Note [What no graph reached]
Behind a graph break in a loop, in code that Dynamo skips, or under hooks that it does not trace, torch runs a model's
own code and asks no backend. So such layers are found as they run: a dispatch mode sees each operation that is not
compiled. The mode ignores compile internals, so that torch.compile compiles and runs under it as it does without.
Generated code calls GEMMs of libraries too, which the mode sees as well: those have AOTAutograd's wrapper of a graph
among their callers."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.module_path import without_parametrization
from te_inductor.passes.pre_grad.sites import convolutions
from te_inductor.passes.pre_grad.sites.products import RECURRENT
from te_inductor.presentation.paths import without_wrappers
from te_inductor.presentation.report import Flops, Report, Site
from te_inductor.recipes import regions
from te_inductor.recipes.regions import Region
from te_inductor.tensor_tables import TensorTable

UNREACHED = "no compiled graph reached it (graph break or skipped code)"

# Operations whose last two tensors are multiplied, with or without a first one that is added.
_PRODUCTS = frozenset("mm addmm _addmm_activation bmm baddbmm addbmm mv addmv".split())
_GROUPED = frozenset(("_grouped_mm", "grouped_mm_fallback"))  # whose first two are
_FUSED = frozenset(  # of x and weights (N, K)
    "linear _native_multi_head_attention _transformer_encoder_layer_fwd mkldnn_rnn_layer _cudnn_rnn".split()
)
_CONVOLUTION = "convolution"
_COMPILED = "_functorch/_aot_autograd/runtime_wrappers.py"  # the file of what runs a compiled graph


@dataclass(frozen=True)
class EagerProduct:
    """One product of an activation and a weight, that ran eagerly."""

    weight: nn.Parameter
    sizes: tuple[int, int, int]  # (M, N, K), batches being rows
    flops: int
    pattern: str  # as `Site.pattern` has it
    region: Region  # of autocast, that it ran in
    outside: Refusal | None = None  # why no recipe is for it, whatever reaches it


class EagerProducts(TorchDispatchMode):
    """Context that collects them: Note [What no graph reached]. A weight is what operations make of parameters
    alone."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[EagerProduct] = []
        self._weights: TensorTable[Any] = TensorTable()  # what is made of a parameter: which one
        self._inside = 0  # of graphs that run by their own Python code

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def aside(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """A graph whose operations are not counted, though they run one by one."""

        @functools.wraps(graph)
        def run(*args: Any) -> Any:
            self._inside += 1
            try:
                return graph(*args)
            finally:
                self._inside -= 1

        return run

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        results = op(*args, **(kwargs or {}))
        if self._inside or not isinstance(op, torch._ops.OpOverload):
            return results
        name = op._schema.name.partition("::")[2]
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        weights = [self._weight(one) for one in tensors]
        if name in _PRODUCTS | _GROUPED | _FUSED or name == _CONVOLUTION:
            if any(weight is not None for weight in weights) and not _in_compiled_graph():
                found = _convolution(args, results, weights) if name == _CONVOLUTION else _read(name, tensors, weights)
                self.found.extend(found)
        elif tensors and None not in weights:
            for result in pytree.tree_leaves(results):
                if isinstance(result, Tensor):
                    self._weights[result] = weights[0]
        return results

    def _weight(self, tensor: Tensor) -> nn.Parameter | None:
        return tensor if isinstance(tensor, nn.Parameter) else self._weights.get(tensor, None)


def _in_compiled_graph() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_COMPILED):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _read(name: str, tensors: Sequence[Tensor], weights: Sequence[nn.Parameter | None]) -> Iterator[EagerProduct]:
    region = regions.active()
    if name in _FUSED:
        x = tensors[0]
        for one, weight in zip(tensors[1:], weights[1:], strict=True):
            if weight is not None and weights[0] is None and one.dim() == 2 and x.dim():
                m, (n, k) = math.prod(x.shape[:-1]), one.shape
                yield EagerProduct(weight, (m, n, k), 2 * m * n * k, "linear", region)
        return
    grouped = name in _GROUPED
    a, b = tensors[:2] if grouped else tensors[-2:]
    of = weights[:2] if grouped else weights[-2:]
    weight = next((one for one in of if one is not None), None)
    k = a.shape[-1]
    # Two weights make a weight, and a column and a row make an outer product.
    if weight is None or None not in of or k == 1:
        return
    n = b.shape[-1] if b.dim() > 1 else 1
    m = math.prod(a.shape[-2:-1]) if grouped else math.prod(a.shape[:-1])
    yield EagerProduct(weight, (m, n, k), 2 * m * n * k, "grouped_linear" if grouped else "linear", region)


def _convolution(args: Sequence[Any], y: Tensor, weights: Sequence[nn.Parameter | None]) -> Iterator[EagerProduct]:
    x, weight, _, stride, padding, _, transposed, _, groups = args
    if weights[0] is None and weights[1] is not None:
        m, n, k = convolutions.sizes_of(x.shape, weight.shape, y.shape, transposed, groups)
        is_layer = {*weight.shape[2:], *stride, groups} == {1} and not transposed and not any(padding)
        outside = None if is_layer else convolutions.OUTSIDE
        yield EagerProduct(weights[1], (m, n, k), 2 * m * n * k, _CONVOLUTION, regions.active(), outside)


def report_of(
    found: Sequence[EagerProduct], names: "Names", recipe_of: Callable[[str, EagerProduct], str | None]
) -> Report:
    """Sites in high precision, one of a weight and its sizes. `recipe_of` says what recipe one would have had in a
    graph, by its module path; None where high precision is what was asked."""
    sites: dict[tuple[int, tuple[int, int, int]], Site] = {}
    flops = Flops()
    for product in found:
        path = names.of(product.weight)
        fqn = f"a parameter of shape {tuple(product.weight.shape)}" if path is None else path
        pattern, outside = product.pattern, product.outside
        if names.is_recurrent(product.weight):
            pattern, outside = "recurrent", RECURRENT
        recipe = recipe_of(fqn, product) if outside is None else None
        reason = (None if recipe is None else UNREACHED) if outside is None else str(outside)
        had = sites.get((id(product.weight), product.sizes))
        sites[id(product.weight), product.sizes] = Site(
            *(fqn, pattern, "fprop", product.sizes, recipe or "none", "high_precision", reason),
            flops=product.flops + (0 if had is None or had.flops is None else had.flops),
            outside=outside is not None,
        )
        flops.add(product.flops, low=False)
    return Report(sites=list(sites.values()), flops=flops)


class Names:
    """Module paths of the parameters of a model, or of the modules that a function is called with or closes over."""

    def __init__(self, model: Callable[..., Any], inputs: Sequence[Any] = ()) -> None:
        self._paths: dict[int, str] = {}
        self._recurrent: set[int] = set()
        for root in _roots(model, inputs):
            for path, module in root.named_modules(remove_duplicate=False):
                for parameter in module.parameters(recurse=False):
                    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
                        self._recurrent.add(id(parameter))
                    # The first name, but for that of an embedding that is a linear layer's weight as well.
                    if id(parameter) not in self._paths or isinstance(module, nn.Linear):
                        path_of_layer = without_parametrization(without_wrappers(path))
                        self._paths[id(parameter)] = path_of_layer
        for shards, whole in compat.gathered():
            path = next((self._paths[id(shard)] for shard in shards if id(shard) in self._paths), None)
            if path is not None:
                self._paths[id(whole)] = path

    def of(self, parameter: Tensor) -> str | None:
        """The path of the module that holds it, None where no module is found."""
        return self._paths.get(id(parameter))

    def is_recurrent(self, parameter: Tensor) -> bool:
        """Whether a recurrent layer holds it."""
        return id(parameter) in self._recurrent


def _roots(model: Any, inputs: Sequence[Any]) -> Iterator[nn.Module]:
    inner = getattr(model, "_orig_mod", model)
    while hasattr(inner, "_torchdynamo_orig_callable"):  # what torch.compile made of a function
        inner = inner._torchdynamo_orig_callable
    function = None if isinstance(inner, nn.Module) else inspect.unwrap(inner)
    function = getattr(function, "__func__", function)
    closed_over = inspect.getclosurevars(function)[:2] if inspect.isfunction(function) else []
    for one in pytree.tree_leaves([inner, getattr(inner, "__self__", None), closed_over, list(inputs)]):
        if isinstance(one, nn.Module):
            yield getattr(one, "_orig_mod", one)
