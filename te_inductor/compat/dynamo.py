"""Dynamo and torch.export: entries, guards, contexts, the frames that Dynamo compiles, and constants of ours in graphs and
schemas, for which torch 2.15 renamed what registers them."""

import copy
import dataclasses
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._library import opaque_object
from torch.utils import _pytree as pytree

from te_inductor.compat.patches import patch

try:  # 2.15
    from torch._custom_class_base import CustomClassBaseMeta as ConstantMeta
except ImportError:  # 2.11 needs the metaclass, 2.13 accepts it
    from torch._opaque_base import OpaqueBaseMeta as ConstantMeta

__all__ = ["ConstantMeta"]


def register_constant(cls: type) -> None:
    """Let instances of `cls` stand in `fx.Node.args` and in an op's schema, compared by value."""
    if hasattr(opaque_object, "register_custom_class"):  # 2.15 renamed both the function and the kind
        opaque_object.register_custom_class(cls, typ="constant")
    elif hasattr(opaque_object, "get_reconstruct_fn"):  # 2.13
        opaque_object.register_opaque_type(cls, typ="value")
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=_members_of(cls))


def _members_of(cls: type) -> dict[str, Any]:
    """What Dynamo reads of an instance. Up to 2.12 it knows nothing of others, and compiles no function that reads one,
    not even with a graph break. A property may raise, and is read of each instance that a graph gets: it stays unknown."""
    names = {field.name for field in dataclasses.fields(cls)} | {name for name in dir(cls) if not name.startswith("_")}
    found = {name: inspect.getattr_static(cls, name, None) for name in sorted(names)}
    kinds = opaque_object.MemberType
    return {
        name: kinds.INLINED if inspect.isroutine(value) else kinds.USE_REAL
        for name, value in found.items()
        if not isinstance(value, property)
    }


def constant_type_name(cls: type) -> str:
    """The name by which a schema refers to a registered class."""
    name: str = opaque_object.get_opaque_type_name(cls)
    return name


@contextmanager
def compiled_apart(model: Callable[..., Any], backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`torch.compile` for few calls, its entries kept from the limit on recompiles of the user's own, and let go of."""
    # Entries are those of a code object: one of our own, into which the model's is inlined as far as the first graph
    # break.
    outer = torch._dynamo.external_utils.wrap_inline(model)
    outer.__code__ = outer.__code__.replace()
    try:
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # from 2.13
            yield torch.compile(outer, backend=backend, isolate_recompiles=True)  # type: ignore[call-overload]
        else:
            with torch._dynamo.config.patch(recompile_limit=sys.maxsize):
                yield torch.compile(outer, backend=backend)
    finally:
        torch._C._dynamo.eval_frame.reset_code(outer.__code__)
        known = torch._dynamo.eval_frame.cached_backends  # for `torch._dynamo.reset`, and for good
        for place in [place for place, one in known.items() if getattr(one, "compiler_fn", None) is backend]:
            del known[place]


@contextmanager
def unwinding_transforms() -> Iterator[None]:
    """Leave the transforms of torch.func, and the level of forward-mode AD, that a failed trace has entered: whatever
    is traced next would run inside them."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    level = torch.autograd.forward_ad._current_level  # the user's; a graph enters its own behind this counter
    try:
        yield
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if level < 0:
            with suppress(RuntimeError):  # none was entered
                torch._C._exit_dual_level(level=0)
        raise


class _Backends(dict[str, Any]):
    """torch's table of backends, in which one may be registered any number of times."""

    def __init__(self, registered: Mapping[str, Any], name: str) -> None:
        super().__init__(registered)
        self.name = name

    def __contains__(self, name: object) -> bool:  # torch asks before it registers one, and refuses those it finds
        return name != self.name and super().__contains__(name)

    def __setitem__(self, name: str, backend: Any) -> None:
        if name == self.name and self.get(name, backend) is not backend:
            raise AssertionError(f"duplicate name: {name}")
        super().__setitem__(name, backend)


def let_threads_register(name: str) -> None:
    """Let several threads find and register the backend `name` at the same time, those included that wait for this
    import of it."""
    from torch._dynamo.backends import registry

    registered = registry._COMPILER_FNS
    table = _Backends(registered, name)
    patch("torch._dynamo.backends.registry._COMPILER_FNS", table)
    for other, backend in list(registered.items()):  # what a thread has added to the old table meanwhile
        table.setdefault(other, backend)


def let_gradients_differ(package: str) -> None:
    """Have Dynamo trace parameters whose gradient stands in another dtype, as `grad_dtype` has it, for the backends of a
    package, as if they had none: it would break the graph, and tell nobody. A program that reads `grad` has it all the
    same, as Dynamo asks the parameter."""
    from torch._subclasses import meta_utils

    theirs = meta_utils.safe_grad

    @functools.wraps(theirs)
    def safe_grad(tensor: Any) -> Any:
        grad = theirs(tensor)
        differs = grad is not None and grad.dtype != tensor.dtype
        return None if differs and _compiles_for(package) else grad

    patch("torch._dynamo.variables.builder.safe_grad", safe_grad)
    patch("torch._subclasses.meta_utils.safe_grad", safe_grad)


def _compiles_for(package: str) -> bool:
    """Whether Dynamo translates a frame for a backend of a package."""
    from torch._dynamo.eval_frame import innermost_backend

    backend: Any = getattr(getattr(_translated(), "output", None), "compiler_fn", None)
    if backend is None:
        return False
    backend = innermost_backend(backend)
    of: str = getattr(getattr(backend, "compiler_fn", backend), "__module__", None) or ""
    return of.partition(".")[0] == package


def is_compiling() -> bool:
    """Whether Dynamo traces the code that asks, or this thread compiles or exports. Of torch.compiler.is_compiling()
    only the first is sure: 2.11 tells nothing of what a compile calls, later releases take another thread's for ours."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    return torch._guards.CompileContext.try_get() is not None


def captures_a_backward() -> bool:
    """Whether Dynamo traces what compiled autograd has captured."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def guard_on(module: str, path: str, by_type: bool = False) -> None:
    """Have Dynamo compare an attribute of a module, by value or by its type, before each run of the graph that it is
    compiling. Where something else calls the backend there is nobody to compare."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return
    source: Any = InstructionTranslator.current_tx().import_source(module)
    for name in path.split("."):
        source = AttrSource(source, name)
    install_guard(source.make_guard(GuardBuilder.TYPE_MATCH if by_type else GuardBuilder.EQUALS_MATCH))


def _guarded_source(node: fx.Node) -> Any:
    """The source of a graph's input; None where Dynamo knows none, or compiles no graph."""
    from torch._guards import TracingContext

    return None if TracingContext.try_get() is None else getattr(node, "_dynamo_source", None)


def _asked_each_time(builder: Any, guard: Any) -> Any:
    """The manager of a tensor's guards, which are asked at each call. Dynamo (2.11) takes tensors for immutable, and asks
    nothing of those in a dict whose entries are the same as before. Which holds for a tensor, is settled when its manager
    is made: by the first of its guards, which is ours, as Dynamo sorts them by the line of their function in its file."""
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        return builder.get_guard_manager(guard)


def guard_on_attribute(node: fx.Node, parameter: object, name: str, by_type: bool = True) -> None:
    """Have Dynamo compare an attribute of a graph's input, by its type or by value, or that there is none, before each
    run of the graph that it is compiling. Where something else calls the backend there is nobody to compare."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    source = _guarded_source(node)
    if source is None:
        return
    install_guard(source.make_guard(_asked_each_time))
    attribute = AttrSource(source, name)
    if hasattr(parameter, name):
        install_guard(attribute.make_guard(GuardBuilder.TYPE_MATCH if by_type else GuardBuilder.EQUALS_MATCH))
    elif "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        install_guard(source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
    else:  # 2.11
        install_guard(attribute.make_guard(GuardBuilder.HASATTR))


def guard_on_tensor(node: fx.Node, holds: Callable[[torch.Tensor], bool], what: str) -> bool:
    """Have Dynamo ask this of a graph's input before each run of the graph that it is compiling; `what` is asked, for
    its logs. False where something else calls the backend, and there is nobody to ask."""
    from torch._dynamo.guards import install_guard

    source = _guarded_source(node)
    if source is None:
        return False

    def create(builder: Any, guard: Any) -> None:
        manager = _asked_each_time(builder, guard)
        manager.add_lambda_guard(holds, [f"{what}({guard.name})"], guard.user_stack)

    install_guard(source.make_guard(create))
    return True


def is_of_a_module(node: fx.Node) -> bool:
    """Whether an input of Dynamo's graph is an attribute of a module, such as a buffer."""
    source: Any = getattr(node, "_dynamo_source", None)
    if source is None:
        return False
    of = source.guard_source() if callable(source.guard_source) else source.guard_source  # up to 2.11, and behind it
    return of is not None and "MODULE" in of.name


def options_of_compiled(compiled: Callable[..., Any], backend: object) -> Mapping[str, Any] | None:
    """The options of a module or function that torch.compile was called with for this backend, which Dynamo knows under
    wrappers; None of any other."""
    from torch._dynamo.eval_frame import innermost_backend

    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:  # what `module.compile()` leaves, and what a function became
        called = compiled if inspect.isfunction(compiled) else getattr(compiled, "_compiled_call_impl", None)
        context = inspect.getclosurevars(called).nonlocals.get("self") if inspect.isfunction(called) else None
    callback = getattr(context, "callback", None)
    found: Any = innermost_backend(callback) if callable(callback) else None
    if getattr(found, "compiler_fn", found) is not backend:
        return None
    return getattr(found, "kwargs", {}).get("options") or {}


def compiles_ahead() -> bool:
    """Whether Dynamo compiles a graph for nobody who calls it, to save what it gets: torch's `aot_compile`."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None and _translated() is None


def _translated() -> Any:
    """The translation of a frame that this thread is in the middle of; None elsewhere."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # there has been none
        return None


def is_translating() -> bool:
    """Whether Dynamo translates a frame in this thread."""
    return _translated() is not None


def compiled_inside(backend: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What torch.compile was called with for this backend and Dynamo has traced into the graph that it is compiling: of
    a module its source, of a function its name; and its options, which that graph does not have."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    output = _translated().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    named = filter(None, (_INSIDE.fullmatch(guard.name) for guard in context.guards_context.dynamo_guards))
    for name in dict.fromkeys(match["module"] or match["compiled"] for match in named):
        with suppress(NameError, LookupError, AttributeError):  # a name that only Dynamo's guards can evaluate
            found = eval(name, scope)
            options = options_of_compiled(found, backend) if callable(found) else None
            if options is not None:
                yield getattr(found, "__qualname__", name), options


# The names of guards on what Dynamo takes out of a compiled module or function, and on modules that others hold, of
# which `module.compile()` may have been called.
_INSIDE = re.compile(r"(?P<compiled>.*)\._(orig_mod|torchdynamo_inline)|(?P<module>.*_modules\['[^']*'\])")


def never_compile(function: Callable[..., Any], with_calls: bool = False) -> None:
    """Let Dynamo run this function's frame as it is, where no other function's graph takes it in, and what it calls
    there, or that as ever (unlike under torch.compiler.disable, which also keeps it out of graphs)."""
    of = torch._C._dynamo.eval_frame
    skip = of._FrameAction.SKIP
    strategy = of._FrameExecStrategy(skip, skip if with_calls else of._FrameAction.DEFAULT)
    of.set_code_exec_strategy(function.__code__, strategy)


def in_uncompiled_frame() -> bool:
    """Whether Python code runs that torch.compile was asked to compile, and did not."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add JSON to the structured trace of the compile that runs, which tlparse reads; nothing where none is written."""
    trace: Any = torch._logging.trace_structured  # type: ignore[attr-defined]
    trace("artifact", lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


@contextmanager
def traced_beside() -> Iterator[None]:
    """Compile a second graph for one that Dynamo hands over. AOTAutograd leaves a graph's metadata in Dynamo's context
    for its backward, which it compiles later, and DDP, where it cuts a graph, counts one graph a piece there: so the
    second has a context of its own."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        yield
        return
    own = copy.copy(context)
    own.ddp_optimizer_ctx, own.fakify_first_call = None, False
    with patch("torch._guards._TLS.tracing_context", own):
        yield


def method_call(node: fx.Node) -> tuple[str, Sequence[Any], Mapping[str, Any]] | None:
    """The method of a tensor, or of DTensor's class, that a node calls, and its arguments behind the tensor. Releases
    before 2.12 call a function of Dynamo's, another one in each node, that holds the arguments."""
    if node.op == "call_method":
        return str(node.target), node.args[1:], node.kwargs
    function = node.target
    if node.op != "call_function":
        return None
    if getattr(function, "__qualname__", "") == "DTensor.from_local":
        return "from_local", node.args[1:], node.kwargs
    if not inspect.isfunction(function) or not function.__name__.startswith(_HELD):
        return None
    held = inspect.getclosurevars(function).nonlocals
    kwargs = {**held.get("kwargs_as_value", {}), **node.kwargs}
    name = function.__name__.removeprefix(_HELD[0]).removeprefix(_HELD[1])
    return name, tuple(held.get("args_as_value", ())), kwargs


_HELD = ("prim_", "prim ")  # how the names of such functions begin


def collective_behind(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The collective that a node waits for, and the nodes that do so, in order, the last of which is `node`. torch 2.11
    waits for one with a gradient in an autograd.Function, which Dynamo writes as a higher-order op."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if _function_name(node) == "wait_tensor":
        return source, (node,)
    if (node.target, node.args[1:]) != (operator.getitem, (0,)) or len(source.users) != 1:
        return None
    if _function_name(source) != "autograd_function_apply":
        return None
    bodies: Any = source.args[:2]
    place = _waits(*(getattr(source.graph.owning_module, str(body.target), None) for body in bodies))
    made = None if place is None else source.args[2 + place]
    own = (body for body in bodies if len(body.users) == 1)
    return (made, (*own, source, node)) if isinstance(made, fx.Node) else None


def _function_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _waits(forward: Any, backward: Any) -> int | None:
    """Finds which operand the body of an autograd.Function waits for, if it does nothing else and hands its gradient
    on."""
    if not (isinstance(forward, fx.GraphModule) and isinstance(backward, fx.GraphModule)):
        return None
    nodes = [*forward.graph.nodes, *backward.graph.nodes]
    modes = (torch._C._set_grad_enabled,)
    steps = [node for node in nodes if node.op not in ("placeholder", "output") and node.target not in modes]
    if len(steps) != 1 or steps[0].target is not torch.ops._c10d_functional.wait_tensor:
        return None
    given: Any = forward.graph.find_nodes(op="placeholder")
    returned: Any = forward.graph.output_node().args[0]  # what it returns, what it saves
    gradients: Any = backward.graph.output_node().args[0]
    if pytree.tree_leaves(returned[0]) != steps or steps[0].args[0] not in given:
        return None
    place: int = given.index(steps[0].args[0])
    return place if gradients[place] is next(iter(backward.graph.nodes)) else None


before_lowering: list[Callable[[], object]] = []  # called where torch.export or AOTInductor traces a layer of ours


def before_export(note: Callable[[object], None]) -> None:
    """Call `note` with each model that `torch.export` is about to trace."""
    from torch.export import _trace

    original = _trace._export

    @functools.wraps(original)
    def noted(mod: Any, *args: Any, **kwargs: Any) -> Any:
        note(mod)
        return original(mod, *args, **kwargs)

    patch("torch.export._trace._export", noted)


def is_decomposed_by_export(op: Any) -> bool:
    """Whether `ExportedProgram.run_decompositions` traces through `op`, a composite op of ours: while it does, it gives
    each such op a Python kernel (torch.export.exported_program._override_composite_implicit_decomp)."""
    return torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels
