"""The module path of a node, as `model.named_modules()` would print it."""

import re

from torch import fx

from te_inductor.presentation.paths import without_wrappers

# A module of a function's closure is a root of its own, and so is one in a list or in *args, as behind a decorator.
_ROOT = re.compile(r"^(.*\.cell_contents|[LG]\['[^']*'\])(\[\d+\])*")
# `module.forward = wrapper(module.forward)`: the bound method that the wrapper calls leads back to the module.
_WRAPPED_FORWARD = re.compile(r"\.forward(\.__closure__\[\d+\]\.cell_contents)+\.__self__")
_KEY = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")
_GETATTR = re.compile(r"getattr\(([^()]*), '([^']*)'\)")  # of a name that is no identifier, such as a container's '0'
_HELD = re.compile(r"(\._parameters\['[^']*'\]|\.\w+)$")  # the parameter itself
_REGISTERED = re.compile(r"\._(parameters|buffers)\['[^']*'\]$")
_COMPUTED = re.compile(r"(?:^|\.)parametrizations\.(\w+)\.")  # the parameter that a parametrization computes
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.\w+$")  # what holds the parameters that a weight is computed from


def module_path(node: fx.Node) -> str:
    """`layers.0.self_attn.q_proj` for a node that Dynamo traced inside that module; "" outside any."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return path_of(str(list(stack.values())[-1][0]))


def holder_path(parameter: fx.Node) -> str:
    """The path of the module that holds a parameter, by the first name at which Dynamo met it."""
    source = source_of(parameter)
    if not source:  # held by the graph itself
        return without_wrappers(str(parameter.target).rpartition(".")[0])
    return path_of(_HELD.sub("", source))


def inner_path(module: str, holder: str) -> str:
    """Finds where in a module the one is that holds a parameter which the module's forward uses by itself: `dt_proj`,
    of `self.dt_proj.weight @ x`. "" where the module holds it, and where another one does, as of a tied weight."""
    holder = without_parametrization(holder)
    prefix = f"{module}." if module else ""
    return holder.removeprefix(prefix) if holder.startswith(prefix) else ""


def without_parametrization(path: str) -> str:
    """The path of the layer whose weight a parametrization computes."""
    return _PARAMETRIZED.sub("", path)


def parameter_name(parameter: fx.Node) -> str:
    """What the module that holds a parameter calls it, by the first name at which Dynamo met it."""
    source = source_of(parameter)
    if not source:
        return str(parameter.target).rpartition(".")[2]
    computed = _COMPUTED.search(path_of(source))
    if computed:
        return computed.group(1)
    held = _HELD.search(source)
    return held.group(0).removeprefix("._parameters").strip("['].") if held else ""


def held_for_one_call(placeholder: fx.Node) -> bool:
    """Whether an input of the graph is a tensor that a parametrization holds, and is no parameter or buffer of it."""
    source = source_of(placeholder)
    return bool(_COMPUTED.search(path_of(source))) and not _REGISTERED.search(source)


def source_of(placeholder: fx.Node) -> str:
    """What Dynamo calls an input; "" of a graph that it did not make."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return ""
    return str(source.name if isinstance(source.name, str) else source.name())


def path_of(source: str) -> str:
    """What Dynamo calls a module, as a path from its root."""
    path, found = _WRAPPED_FORWARD.sub("", source), 1
    while found:
        path, found = _GETATTR.subn(r"\1.\2", path)
    path = _KEY.sub(lambda key: "." + next(part for part in key.groups() if part is not None), _ROOT.sub("", path))
    return without_wrappers(path.strip("."))
