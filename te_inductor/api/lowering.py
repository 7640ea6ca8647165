"""`lower`: put low-precision layers into a graph that Dynamo did not make: an exported program, or a traced graph of
forward and backward."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor import lowerings
from te_inductor.backend import parse, run_passes
from te_inductor.config import AOT, OPTIONS, Options
from te_inductor.diagnostics import announce
from te_inductor.errors import OptionError, wrong_type
from te_inductor.passes import pre_grad
from te_inductor.passes.pre_grad.plan import LoweredPlan, Plan
from te_inductor.recipes import regions

Program = torch.export.ExportedProgram


@overload
def lower(program: Program, options: Mapping[str, Any] | None = None) -> Program: ...


@overload
def lower(
    program: fx.GraphModule,
    options: Mapping[str, Any] | None = None,
    *,
    parameters: Sequence[str] | Mapping[str, str] | None = None,
) -> fx.GraphModule: ...


def lower(
    program: Any,
    options: Mapping[str, Any] | None = None,
    *,
    parameters: Sequence[str] | Mapping[str, str] | None = None,
) -> Any:
    """The program with its linear layers in low precision; `program` itself stays as it is.

    Args:
        program: what `torch.export.export` returned, also behind `run_decompositions()`; or an ATen graph that make_fx
            or AOTAutograd has traced, in which `node.meta["val"]` holds fake tensors: of a forward, or of forward, loss
            and backward. There the three products of each layer become its three low-precision GEMMs.
        options: `recipe`, `policy` and `fallback`, as in ``torch.compile(model, backend="te", options=options)``;
            policies name modules by `nn_module_stack`, and where a graph has none, by the weights' names.
        parameters: of a traced graph, which of its inputs are parameters: names of its first inputs, in order, or
            {name of a placeholder: name}. None: inputs that were an `nn.Parameter` when the graph was traced, those
            that AOTAutograd describes as one, and the graph's own attributes.

    Returns:
        An exported program, whose layers are `te_inductor.exported_linears` or `exported_grouped_linears`: it runs
        (`module()`), is saved and loaded where `te_inductor` is imported, and is compiled by
        `torch._inductor.aoti_compile_and_package`. Of a traced graph a graph module of the same inputs and outputs,
        made of te_inductor's casts and GEMMs.

    Delayed scaling, which keeps state, stays in high precision, with a warning; stored
    weights (`quantize_` before the export) are left as they are.

    Raises:
        OptionError: a wrong option, or one that has no effect here; `program` or `parameters` is wrong.
        RecipeError: unknown recipe.
        FallbackError: with ``fallback="error"``, where a layer does not run as asked.
    """
    parsed = parse_options(options)
    regions.note_compile()
    lowerings.install(parsed.fallback)  # Inductor may compile the program without our backend
    if isinstance(program, Program):
        if parameters is not None:
            raise OptionError("parameters= beside an exported program, which knows its own; expected none")
        return _of_program(program, parsed)
    if not isinstance(program, fx.GraphModule):
        raise OptionError(wrong_type("lower's program", program, "an ExportedProgram or an fx.GraphModule"))
    return _of_graph(program, parsed, parameters)


def plan_of(program: Any, options: Options, parameters: Any = None) -> Plan:
    """What the passes take, on a copy of the program's graph."""
    if isinstance(program, Program):
        gm, named = _deep_copied(program.graph_module), dict(program.graph_signature.inputs_to_parameters)
    else:
        gm = _copied(program)
        named = _parameters(gm, parameters)
    _set_values(gm, named)
    nodes = {node.name: node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")}
    paths = {nodes[name]: path for name, path in named.items()}
    return LoweredPlan(gm, options, parameters=paths, is_program=isinstance(program, Program))


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Reads the options that a lowered program can have.

    Raises:
        OptionError: another is given.
    """
    parsed, default = parse(None, options), Options()
    remedies = {one.name: one.not_of_programs for one in OPTIONS.values() if one.not_of_programs}
    given = [name for name in remedies if getattr(parsed, name) != getattr(default, name)]
    for name in (*given, *parsed.inductor):
        remedy = remedies.get(name, f"give Inductor's options to {AOT}")
        raise OptionError(f"option {name!r} has no effect on a program that is lowered, expected none: {remedy}")
    return parsed


def _of_program(program: Program, options: Options) -> Program:
    plan = plan_of(program, options)
    if not _is_rewritten(plan, pre_grad.EXPORTED):
        return program
    before, after = (pytree.arg_tree_leaves(*graph.output_node().args) for graph in (program.graph, plan.gm.graph))
    for node, made in zip(before, after, strict=True):
        if isinstance(node, fx.Node):
            made.name = node.name  # as the signature has it
    return Program(
        root=plan.gm,
        graph=plan.gm.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _of_graph(gm: fx.GraphModule, options: Options, parameters: Any) -> fx.GraphModule:
    plan = plan_of(gm, options, parameters)
    return plan.gm if _is_rewritten(plan, pre_grad.TRACED) else gm


def _is_rewritten(plan: Plan, passes: Sequence[pre_grad.Pass]) -> bool:
    """Runs passes, and says whether none has failed."""
    found = run_passes(plan, passes)
    announce(found, plan.options.fallback)
    if found.failure is not None:
        return False
    for node in plan.gm.graph.nodes:
        node.meta.pop("example_value", None)
    return True


def _deep_copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph with its nodes' own names: a copy of one that is called as a function of Python's, such as
    `input`, has another, and the signature has this one."""
    made = copy.deepcopy(gm)
    for node, twin in zip(gm.graph.nodes, made.graph.nodes, strict=True):
        twin.name = node.name
    return made


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a module with a graph of its own, and the same tensors."""
    graph = fx.Graph(tracer_cls=gm.graph._tracer_cls)
    copies: dict[fx.Node, fx.Node] = {}
    output: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(output[0]).meta = dict(output[1].meta)
    for node, made in copies.items():
        made.meta = dict(node.meta)
    graph.set_codegen(gm.graph._codegen)
    made_gm = fx.GraphModule(gm, graph)
    made_gm.meta = dict(gm.meta)
    return made_gm


def _parameters(gm: fx.GraphModule, given: Any) -> dict[str, str]:
    """Names of parameters by the names of their nodes."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = [node.name for node in placeholders]
    held = {node.name: str(node.target) for node in gm.graph.find_nodes(op="get_attr") if _is_parameter(gm, node)}
    if given is None:
        found = held | dict(_described(placeholders))
    elif isinstance(given, Mapping):
        found = held | dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) <= len(names):
        found = held | dict(zip(names, given, strict=False))
        _check_tensors(placeholders, given)
    else:
        expected = f"names of its first inputs, of which there are {len(names)}, or a dict of placeholders' names"
        raise OptionError(wrong_type("lower's parameters", given, expected))
    unknown = found.keys() - set(names) - set(held)
    if unknown:
        raise OptionError(f"lower's parameters name {min(unknown)!r}, expected placeholders of the graph: {names[:8]}")
    if not found:
        raise OptionError(
            "lower was not told which of the graph's inputs are parameters, and none was an nn.Parameter when it was"
            " traced; expected parameters=[name, …] of its first inputs, or {placeholder: name}"
        )
    return found


def _check_tensors(placeholders: Sequence[fx.Node], names: Sequence[str]) -> None:
    """A trace opens a DTensor into its local tensor and its mesh, so that names in order would be others' names."""
    tensors = {node for node in placeholders if isinstance(node.meta.get("val"), Tensor)}
    for node, name in zip(placeholders, names, strict=False):
        if tensors and node not in tensors:
            raise OptionError(
                f"lower's parameters name {name!r} at input {node.name!r}, which is no tensor: the trace has opened DTensors"
                " into several inputs each; expected {placeholder: name} of the local tensors"
            )


def _is_parameter(gm: fx.GraphModule, node: fx.Node) -> bool:
    held: Any = gm
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    return isinstance(held, nn.Parameter)


def _described(placeholders: Sequence[fx.Node]) -> Iterator[tuple[str, str]]:
    """Describes placeholders by AOTAutograd's word, or by what the value is."""
    for node in placeholders:
        described = getattr(node.meta.get("desc"), "target", None)
        if isinstance(described, str) and type(node.meta["desc"]).__name__ == "ParamAOTInput":
            yield node.name, described
        elif isinstance(node.meta.get("val"), nn.Parameter):
            yield node.name, node.name


def _set_values(gm: fx.GraphModule, parameters: Mapping[str, str]) -> None:
    """Give each node the value that the passes read: a fake tensor, a parameter where it is one."""
    mode = next((value.fake_mode for value in _values(gm)), None)
    if mode is None:
        raise OptionError(
            "the graph's nodes have no values, expected fake tensors in node.meta['val']; trace it with make_fx, or run"
            " torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm).propagate(*inputs) first"
        )
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if "val" in node.meta:
                made = pytree.tree_map_only(Tensor, lambda one: _plain(one, mode), node.meta["val"])
                if module is gm and node.name in parameters and isinstance(made, FakeTensor):
                    made = nn.Parameter(made, requires_grad=False)
                node.meta["example_value"] = made


def _values(gm: fx.GraphModule) -> Iterator[FakeTensor]:
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            yield node.meta["val"]


def _plain(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """Returns a value without a gradient, in one mode: a graph traced with real tensors has one for each value."""
    if isinstance(value, FakeTensor) and value.fake_mode is mode:
        return value.detach()
    if is_traceable_wrapper_subclass(value):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
