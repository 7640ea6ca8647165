"""The tensors that are alive at the peak of a training step, by what Inductor schedules.

# Note [An estimated peak]
Each graph of Dynamo's is traced, lowered and scheduled as its compile would have it, on the device of its tensors; no
code is written. Inductor's memory planning (`torch._inductor.memory`) then has, of each kernel in its order, what it
allocates and what it lets go. A step is the forwards of the graphs in their order, the backwards in the reverse order,
and the optimizer: parameters, its state, and what forwards saved stay, and gradients come in with each backward. A
kernel that reads a tensor for the last time at the places where it writes one as large writes over it, as Inductor has
it do. Not counted are what runs between graphs, workspaces of kernels and libraries, parts that the allocator leaves
unused, and what a fused optimizer allocates in its step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.api.tracing import alone, module_of, stand_in, traced
from te_inductor.backend import parse, rehearse
from te_inductor.config import Options
from te_inductor.errors import OptionError
from te_inductor.passes.graph.module_path import holder_path, path_of
from te_inductor.passes.graph.walks import reached
from te_inductor.passes.pre_grad.plan import Plan

PARAMETER, GRADIENT, OPTIMIZER, SAVED = "parameter", "gradient", "optimizer", "saved for backward"
INPUT, TEMPORARY = "input, output, buffer", "temporary"
KEEPERS = (PARAMETER, OPTIMIZER, GRADIENT, SAVED, INPUT, TEMPORARY)
STATES = {"none": 0, "sgd": 1, "adamw": 2}  # tensors like a parameter that an optimizer keeps of it


@dataclass(frozen=True)
class Held:
    """A tensor in memory, and what keeps it there."""

    module: str  # the path of the module that makes it; of a parameter its own
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    keeper: str


@dataclass(frozen=True)
class Peak:
    """A moment of a step, and what is alive in it."""

    when: str
    held: list[Held]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.held)

    def of(self, keeper: str) -> int:
        """The bytes that something keeps."""
        return sum(one.bytes for one in self.held if one.keeper == keeper)


@dataclass
class _Buffer:
    """A tensor of a scheduled graph, alive in its kernels from `start` to `end`."""

    name: str
    held: Held
    start: int
    end: int


@dataclass
class _Scheduled:
    """A graph of a forward or a backward."""

    inputs: list[str]  # names of its placeholders
    outputs: list[str]  # and of the nodes that it returns
    buffers: list[_Buffer] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)  # names of buffers, a place an output
    steps: int = 0
    is_planned: bool = False  # whether Inductor's compile was ended behind its schedule

    def alive(self) -> Iterator[list[_Buffer]]:
        """What is alive in each kernel."""
        for step in range(self.steps):
            yield [one for one in self.buffers if one.start <= step <= one.end]


@dataclass
class _Graph:
    """A graph of Dynamo's."""

    parameters: dict[int, Held]  # by their places among the inputs
    forward: _Scheduled
    backward: _Scheduled | None

    def saved(self) -> dict[str, str]:
        """The backward's inputs, and the forward's outputs that they are. Each has its node's name; what option `saved`
        has put there has names of its own, in the same order."""
        given = [name for name in self.backward.inputs if not _is_tangent(name)] if self.backward is not None else []
        last = self.forward.outputs[len(self.forward.outputs) - len(given) :]
        new = zip([one for one in given if one not in last], [one for one in last if one not in given], strict=True)
        return {name: name for name in given if name in last} | dict(new)

    def kept(self) -> dict[str, str]:
        """What keeps buffers of the forward behind it."""
        saved = set(self.saved().values())
        pairs = [*zip(self.forward.outputs, self.forward.returned, strict=False)]
        found = {buffer: INPUT for _, buffer in pairs[: len(pairs) - len(saved)]}
        return found | {buffer: SAVED for output, buffer in pairs if output in saved}

    def behind(self) -> list[Held]:
        """What the forward leaves in memory."""
        kept = self.kept()
        return [replace(one.held, keeper=kept[one.name]) for one in self.forward.buffers if one.name in kept]

    def in_forward(self, alive: Sequence[_Buffer]) -> list[Held]:
        kept = self.kept()
        return [replace(one.held, keeper=kept.get(one.name, one.held.keeper)) for one in alive]

    def in_backward(self, alive: Sequence[_Buffer]) -> list[Held]:
        """Returns what is alive in a kernel of the backward, with the forward's names for what that saved. Parameters and
        inputs are counted elsewhere, and what the backward is given in several views is counted once."""
        assert self.backward is not None
        places = {name: place for place, name in enumerate(self.backward.returned) if place in self.parameters}
        buffers = {one.name: one.held for one in self.forward.buffers}
        pairs = zip(self.forward.outputs, self.forward.returned, strict=False)
        outputs = {output: buffer for output, buffer in pairs if buffer in buffers}
        made = {name: outputs[output] for name, output in self.saved().items() if output in outputs}
        found, saved = list[Held](), dict[str, Held]()
        for one in alive:
            if one.name in places:
                found.append(replace(one.held, keeper=GRADIENT, module=self.parameters[places[one.name]].module))
            elif one.name not in self.backward.inputs or _is_tangent(one.name):
                found.append(one.held)
            elif one.name in made:
                saved[made[one.name]] = replace(buffers[made[one.name]], keeper=SAVED)
        return [*found, *saved.values()]


def _is_tangent(name: str) -> bool:
    return name.startswith("tangents_")


def peak_of(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    optimizer: str,
) -> Peak:
    """The peak of a training step: Note [An estimated peak].

    Raises:
        OptionError: nothing of it is trained, or it is on the meta device, for which Inductor schedules nothing.
    """
    parsed, graphs = parse(None, options), list[_Graph]()

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in examples):
            raise OptionError(
                "the model is on the meta device, expected one on a GPU or a CPU, for which Inductor plans"
            )
        graphs.append(_scheduled(gm, parsed, examples))
        return gm.forward

    with traced(model, backend, "silent") as run:
        run(*inputs, **kwargs)
    if not any(graph.backward is not None for graph in graphs):
        raise OptionError("no graph of the model has a backward, expected a model that is trained")
    return max(_moments(graphs, _always(model, (inputs, kwargs), optimizer)), key=lambda moment: moment.bytes)


def _always(model: Any, inputs: Any, optimizer: str) -> list[Held]:
    """What is in memory for all of a step."""
    found, module = list[Held](), module_of(model)
    for name, parameter in module.named_parameters():
        found.append(_held(name.rpartition(".")[0], parameter, PARAMETER))
        if parameter.requires_grad:
            found += [replace(found[-1], keeper=OPTIMIZER)] * STATES[optimizer]
    found += [_held(name.rpartition(".")[0], buffer, INPUT) for name, buffer in module.named_buffers()]
    tensors = (one for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor))
    return found + [_held("", one, INPUT) for one in tensors]


def _held(module: str, tensor: torch.Tensor, keeper: str) -> Held:
    return Held(module, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes, keeper)


def _moments(graphs: Sequence[_Graph], always: list[Held]) -> Iterator[Peak]:
    """Each kernel of a step, and the optimizer behind them."""
    for place, graph in enumerate(graphs):
        before = [one for other in graphs[:place] for one in other.behind()]
        for alive in graph.forward.alive():
            yield Peak("forward", [*always, *before, *graph.in_forward(alive)])
    gradients = list[Held]()
    returned = [one for graph in graphs for one in graph.behind() if one.keeper == INPUT]
    for place, graph in reversed([*enumerate(graphs)]):
        if graph.backward is None:
            continue
        before = returned + [one for other in graphs[:place] for one in other.behind() if one.keeper == SAVED]
        last = list[Held]()
        for alive in graph.backward.alive():
            last = graph.in_backward(alive)
            yield Peak("backward", [*always, *gradients, *before, *last])
        gradients += [one for one in last if one.keeper == GRADIENT]
    yield Peak("optimizer's step", [*always, *gradients])


def _scheduled(gm: fx.GraphModule, options: Options, inputs: Sequence[Any]) -> _Graph:
    """Has Inductor schedule the forward and the backward of a graph."""
    from torch._functorch import config as functorch

    found: dict[bool, _Scheduled] = {}
    current: list[_Scheduled] = []

    def plan(nodes: list[Any]) -> list[Any]:
        from torch._inductor.graph import SubgraphLowering
        from torch._inductor.virtualized import V

        if isinstance(V.graph, SubgraphLowering):
            return nodes
        if nodes:
            _read_schedule(nodes, V.graph, current[0])
        current[0].is_planned = True
        raise _PlannedError

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def compile(gm: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
            [output] = gm.graph.find_nodes(op="output")
            outputs = [getattr(one, "name", "") for one in output.args[0]]
            current[:] = [_Scheduled([one.name for one in gm.graph.find_nodes(op="placeholder")], outputs)]
            found[bool(given.get("is_backward"))] = current[0]
            try:
                return inner(gm, inputs, **given)
            except Exception as error:
                if not current[0].is_planned:
                    raise error
            return stand_in(gm, inputs)

        return compile

    inductor = {**options.inductor, "_post_fusion_custom_pass": plan, "fx_graph_cache": False}
    own = Plan(gm, replace(alone(options), inductor=inductor), inputs)
    given = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    parameters = {
        place: _held(holder_path(node), one, PARAMETER)
        for place, (node, one) in enumerate(given)
        if isinstance(one, nn.Parameter)
    }
    with functorch.patch(force_non_lazy_backward_lowering=True):
        rehearse(own, around)
    return _Graph(parameters, found[False], found.get(True))


class _PlannedError(Exception):
    """Ends a compile where its schedule is known."""


def _read_schedule(nodes: list[Any], graph: Any, found: _Scheduled) -> None:
    """Puts down the lifetimes of a graph's buffers in the order in which Inductor would run its kernels."""
    from torch._inductor import config, memory
    from torch.utils._ordered_set import OrderedSet

    graph.scheduler = scheduler = nodes[0].scheduler  # as it is when that is made
    given, returned = OrderedSet(graph.graph_inputs), OrderedSet(graph.get_output_names())
    about = (scheduler.name_to_buf, scheduler.name_to_fused_node, given, returned)
    if config.reorder_for_peak_memory:
        nodes = memory.reorder_for_peak_memory(nodes, *about)
    _, freeable = memory.prepare_planning_info(nodes, *about)
    lifetimes, _, _ = memory.compute_memory_timeline(nodes, freeable, returned)
    found.steps, found.returned = len(nodes), list(graph.get_output_names())
    made_in = {one.get_name(): step for step, node in enumerate(nodes) for one in node.get_outputs()}
    for one in lifetimes:
        name, last = one.buffer.get_name(), len(nodes) - 1
        if not one.size_free:
            continue
        held = _held_by(graph, one.buffer, one.size_free)
        end = last if one.end_step == -1 else one.end_step
        found.buffers.append(_Buffer(name, held, min(one.start_step, *_parents(one.buffer, made_in)), end))
    found.buffers += _tangents(nodes, graph)
    _write_over(nodes, found.buffers, graph)


def _tangents(nodes: Sequence[Any], graph: Any) -> Iterator[_Buffer]:
    """The gradients that a backward is given, each until its last use."""
    last = {one.name: step for step, node in enumerate(nodes) for one in node.read_writes.reads}
    for name in filter(_is_tangent, graph.graph_inputs):
        value = graph.graph_inputs[name]
        size = compat.size_hint(graph.sizevars, value.get_numel()) * value.get_dtype().itemsize
        yield _Buffer(name, _held_of(graph, "", value, size), 0, last.get(name, 0))


def _parents(buffer: Any, made_in: Mapping[str, int]) -> list[int]:
    """Returns when the kernels begin that make several results, of one of these."""
    from torch._inductor.ir import MultiOutput

    node = getattr(buffer, "node", None)
    if not isinstance(node, MultiOutput):
        return [len(made_in)]
    names = [one.get_name() for one in node.inputs if not isinstance(one, Sequence)]
    return [made_in.get(name, len(made_in)) for name in names] or [len(made_in)]


def _held_by(graph: Any, buffer: Any, size: int) -> Held:
    node = getattr(buffer, "node", None)
    if node is None:
        return _held_of(graph, "", graph.graph_inputs[buffer.get_name()], size)
    return _held_of(graph, _module_near(node.get_origins()), node, size)


def _module_near(origins: Iterable[fx.Node]) -> str:
    """The module that some nodes are of; of layers that run as one, and of what is cast behind them, the module that
    reads them."""
    nodes = sorted(origins, key=lambda one: one.name)
    nameless = reached(nodes, lambda one: () if _module_of(one) else one.all_input_nodes)
    readers = (user for one in nameless if not _module_of(one) for user in one.users)
    return next(filter(None, map(_module_of, (*nodes, *readers))), "")


def _held_of(graph: Any, module: str, value: Any, size: int) -> Held:
    sizes = tuple(compat.size_hint(graph.sizevars, one) for one in value.get_size())
    return Held(module, sizes, str(value.get_dtype()).removeprefix("torch."), size, TEMPORARY)


def _module_of(node: fx.Node) -> str:
    """The module that a node of the forward is of, and of the backward that whose gradient it computes."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return path_of(str(list(stack.values())[-1][0])) if stack else ""


def _write_over(nodes: Sequence[Any], buffers: Sequence[_Buffer], graph: Any) -> None:
    """Ends what a kernel writes over one kernel earlier, as that memory is counted as its result's."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.ir import DonatedBuffer

    known = {one.name: one for one in buffers}
    donated = {name for name, one in graph.graph_inputs_original.items() if isinstance(one, DonatedBuffer)}
    own = (donated | set(graph.scheduler.name_to_buf)) & set(known)
    for step, node in enumerate(nodes):
        for part in node.get_nodes():
            reads = [one for one in part.read_writes.reads if isinstance(one, MemoryDep) and one.name in own]
            for write in part.read_writes.writes:
                if not isinstance(write, MemoryDep) or write.name not in known:
                    continue
                same = [known[one.name] for one in reads if (one.index, one.size) == (write.index, write.size)]
                size = known[write.name].held.bytes
                for old in [one for one in same if one.end == step > one.start and one.held.bytes == size][:1]:
                    old.end = step - 1
