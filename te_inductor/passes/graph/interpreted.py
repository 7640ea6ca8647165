"""Graphs that run by the eager kernels of their operators, for which no code is generated.

A graph that runs once or twice, as that of a first step under delayed scaling, costs more to compile than to run. Such a
graph is traced and partitioned like any other, so that its backward keeps what a compiled one would keep, and then each of
its nodes is run by itself. That takes more memory while it runs, as each operator writes what it computes, and it is wrong
where an operator's eager kernel means something else than its generated code. `interpreting` compiles a graph after all
where either of these is so.

# Note [Ranks that interpret]
A graph and its generated code may call collectives in different orders, and ranks have to call them in one. Two kinds of
graphs are interpreted.

- Where layers exchange no tensors with other ranks, each rank decides for itself, by the memory that it has among other
  things, so that one may interpret a graph of which another runs generated code, or run the graph of later steps there,
  as it has loaded state. The reduction of amaxes at the end of a step is a collective of either graph. A graph with no
  other has only one order, whoever runs it. One with more is compiled: collectives of the program, and amaxes of several
  process groups.
- Where layers exchange tensors, as those of tensor parallelism do, ranks run first steps together anyway (Note [Ranks that
  choose]), and all interpret them where each of them may. They tell each other in the first compile of these layers, of
  which no rank has a graph yet, so that all come to it, whatever graphs they compile later: to run the layers takes all
  of them. What they have found holds for each later graph of these layers, of other sizes too, so that it does not matter
  which rank compiles one. That also goes for memory: a later graph that does not fit is interpreted. A graph that a rank
  finds in a compile cache is asked about in the place of its compile, so that other ranks may compile theirs meanwhile.
  Code comes for all in the same call, as they count the calls that were first steps alike."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch._inductor.output_code import OutputCode
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.passes.graph import steps
from te_inductor.passes.graph.values import bytes_of
from te_inductor.passes.graph.writes import written_by
from te_inductor.recipes.delayed import ScaleUpdate

# A graph's own tensors may take this part of the memory that is free when it is compiled.
SHARE_OF_FREE_MEMORY = 0.5


def interpreting(compile_graph: Callable[..., Any], agree: Callable[[bool], bool] | None = None) -> Callable[..., Any]:
    """Returns a compiler of single graphs, forward and backward of one trace, that interprets those that it may and
    gives `compile_graph` the others. `agree` tells other ranks whether this one may, and returns whether all do. A forward
    that is compiled chooses the strides of what it keeps, so that the backward behind it is compiled as well. CUDA graphs
    are of generated code, and where algorithms have to be deterministic, eager kernels that are not raise, as that of
    `cumsum`."""
    compiles, begun = False, False

    def compile(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal compiles, begun
        compiles = compiles or _needs_code(options) or not means_the_same(gm, together=agree is not None)
        most = {} if compiles else most_written_of_gpus(gm)
        if agree is None or not begun:  # nothing that ranks have agreed on depends on what is free behind it
            compiles = compiles or not fits(most)
        if agree is not None and not begun:
            compiles = not agree(not compiles)
        begun = True
        return _with_code(compile_graph, gm, inputs, options) if compiles else Interpreted(gm, most)

    return compile


def _with_code(compile_graph: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[Any], options: Any) -> Any:
    """What `compile_graph` returns. Inductor's own cache keeps it, and AOTAutograd's not, by which another process would
    run it without asking whether the graph may be interpreted there."""
    with compat.keeping_whole_graphs(False):
        made = compile_graph(gm, inputs, **options)
    if isinstance(made, OutputCode):
        compat.keep_out_of_graph_cache(made, "another process may interpret the graph of this code")
    return made


def _needs_code(options: Mapping[str, Any]) -> bool:
    return bool(options.get("cudagraphs")) or torch.are_deterministic_algorithms_enabled()


def means_the_same(gm: fx.GraphModule, together: bool = False) -> bool:
    """Whether the eager kernels of a graph compute what its generated code does. Inductor's random numbers follow from a
    seed that their eager kernels do not read, so that a backward would draw other ones; collectives of generated code may
    come in another order than a graph's, if there are several and ranks do not interpret them `together`; and most
    operators of higher order are correct, but as slow and large as the programs that they stand for, such as attention
    with all of its scores."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    namespaces = ("aten", "te_inductor", *(_COLLECTIVES if together else ()))
    reductions = 0 if together else sum(map(_reduces_amaxes, calls))
    return all(_means_the_same(node.target, namespaces) for node in calls) and reductions <= 1


def _means_the_same(target: Any, namespaces: Sequence[str]) -> bool:
    if isinstance(target, HigherOrderOperator):
        return target.name() in _WRITES
    if isinstance(target, OpOverload):
        return target.namespace in namespaces or (
            target.namespace == "prims" and not target._opname.startswith("inductor_")
        )
    return True  # Python's operators on sizes, and parts of several results


def _reduces_amaxes(node: fx.Node) -> bool:
    """Whether an operator may reduce amaxes over other ranks."""
    constants = pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(one, ScaleUpdate) and bool(one.groups) for one in constants)


_COLLECTIVES = ("_c10d_functional", "_dtensor")
_WRITES = ("auto_functionalized", "auto_functionalized_v2")


def fits(most: Mapping[torch.device, int]) -> bool:
    """Whether the memory that is free on each GPU holds so many bytes, with room to spare."""
    return all(size <= SHARE_OF_FREE_MEMORY * _free(device) for device, size in most.items())


def _free(device: torch.device) -> int:
    """The bytes that torch's allocator can give."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def most_written_of_gpus(gm: fx.GraphModule) -> dict[torch.device, int]:
    values = [one for node in gm.graph.nodes for one in pytree.tree_leaves(node.meta.get("val"))]
    devices = {one.device for one in values if isinstance(one, torch.Tensor) and one.is_cuda}
    return {device: most_written(gm, device) for device in devices}


def most_written(gm: fx.GraphModule, device: torch.device) -> int:
    """The most bytes that the results of nodes take at once, each until its last use."""
    last = {
        memory: node for node in gm.graph.nodes for used in node.all_input_nodes for memory in _written(used, device)
    }
    given = {memory for node in gm.graph.find_nodes(op="placeholder") for memory in _written(node, device)}
    alive: dict[StorageWeakRef, int] = {}
    most = 0
    for node in gm.graph.nodes:
        alive |= {memory: size for memory, size in _written(node, device).items() if memory not in given}
        most = max(most, sum(alive.values()))
        alive = {memory: size for memory, size in alive.items() if last.get(memory, node) is not node}
    return most


def _written(node: fx.Node, device: torch.device) -> dict[StorageWeakRef, int]:
    """The memory behind a node's results on a device, and its bytes."""
    tensors = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
    return {StorageWeakRef(one.untyped_storage()): bytes_of(one) for one in tensors if one.device == device}


class Interpreted(OutputCode):  # type: ignore[misc]
    """A graph that runs node by node. Generated code writes an input without a word to autograd, which is told of it by
    AOTAutograd where it has to be; so does this, as a backward may write state that another forward's has kept.

    AOTAutograd's cache keeps it as `steps` writes it, so that a later process does not trace it anew. That process asks
    for itself what does not follow from the graph: whether it may be interpreted there."""

    def __init__(self, gm: fx.GraphModule, most: Mapping[torch.device, int] | None = None) -> None:
        super().__init__()
        self._boxed_call = True
        self.steps: steps.Steps | None = steps.of(gm)
        self.text: bytes | None = None  # in a cache, in their place
        self.most = most or {}  # bytes that it takes
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.written = sorted({places[one] for node in gm.graph.nodes for one in written_by(node) if one in places})
        self.is_of_any_size = any(_has_symbols(node.meta.get("val")) for node in places)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.steps is not None
        counted = tuple(inputs[place] for place in self.written if not inputs[place].is_inference())
        with _unsafe_preserve_version_counter(counted):
            return self.steps.run(inputs)  # type: ignore[arg-type]  # a list, as it is boxed

    def prepare_for_serialization(self) -> None:
        assert self.steps is not None
        try:
            if self.most and self.is_of_any_size:
                raise pickle.PicklingError("its memory depends on the sizes of a call")
            self.text, self.steps = steps.write(self.steps), None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            compat.bypass_graph_cache(error)

    def post_compile(self, inputs: Sequence[Any], constants: Any, options: Mapping[str, Any]) -> None:
        """Called where a cache has given it."""
        agree = _may_be_loaded.get()
        if agree is None or not agree(not _needs_code(options) and fits(self.most)):
            compat.miss_graph_cache()
        assert self.text is not None
        self.steps, self.text = steps.read(self.text), None

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """It has no kernels of Triton's."""


def _has_symbols(value: Any) -> bool:
    return isinstance(value.numel() if isinstance(value, torch.Tensor) else value, torch.SymInt)


_may_be_loaded: ContextVar[Callable[[bool], bool] | None] = ContextVar("te_inductor_may_be_loaded", default=None)


@contextmanager
def kept(agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """A compile in which AOTAutograd's cache keeps graphs that are interpreted, and returns them; `agree` as in
    `interpreting`, which a graph of the cache asks in the place of the compile that it spares."""
    token = _may_be_loaded.set(agree or bool)
    try:
        with compat.keeping_whole_graphs():
            yield
    finally:
        _may_be_loaded.reset(token)
