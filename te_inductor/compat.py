"""What differs between torch 2.11 and 2.15, each difference in one function. Nothing else asks for torch's version."""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

if torch.__version__ < (2, 11):  # type: ignore[operator]
    raise ImportError(
        f"te_inductor needs torch 2.11 or later, found {torch.__version__}; pip install --upgrade 'torch>=2.11'"
    )

from torch import fx
from torch._library import opaque_object

try:  # 2.15
    from torch._custom_class_base import CustomClassBaseMeta as ConstantMeta
except ImportError:  # 2.11 needs the metaclass, 2.13 accepts it
    from torch._opaque_base import OpaqueBaseMeta as ConstantMeta

__all__ = [
    "ConstantMeta",
    "autotune",
    "before_export",
    "compile_fx",
    "compiled_apart",
    "constant_type_name",
    "guard_on",
    "guard_on_attribute",
    "in_uncompiled_frame",
    "inside_ddp",
    "is_gathered",
    "let_marks_be_saved",
    "never_compile",
    "options_of_compiled",
    "register_constant",
    "saving_what_is_cut",
    "side_by_side",
    "traced_beside",
    "unwinding_transforms",
]


def register_constant(cls: type) -> None:
    """Let instances of `cls` stand in `fx.Node.args` and in an op's schema, compared by value."""
    if hasattr(opaque_object, "register_custom_class"):  # 2.15 renamed both the function and the kind
        opaque_object.register_custom_class(cls, typ="constant")
    else:
        opaque_object.register_opaque_type(cls, typ="value")


def constant_type_name(cls: type) -> str:
    """The name by which a schema refers to a registered class."""
    name: str = opaque_object.get_opaque_type_name(cls)
    return name


def size_hint(sizevars: Any, size: Any) -> int:
    """A likely value of a size that Inductor knows by a symbol, without a guard."""
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint  # 2.13 renamed it
    return int(hint(size))


def autotune(name: str, choices: list[Any], nodes: list[Any], layout: Any) -> Any:
    """The result of the fastest of several choices, in Inductor's IR; from 2.13 Inductor returns the choice as well."""
    from torch._inductor.select_algorithm import autotune_select_algorithm

    found = autotune_select_algorithm(name, choices, nodes, layout)
    return found[0] if isinstance(found, tuple) else found


def side_by_side(pieces: Sequence[Any], dim: int) -> Any:
    """Inductor's lowering of `aten.cat`, called by another op's. Where its inputs read the same it looks, from 2.13 on,
    at the result of the node that is lowered: ours has several."""
    from torch._inductor import lowering

    with mock.patch.object(lowering, "_cat_inputs_recombine_reduction", lambda *_: None, create=True):
        return lowering.lowerings[torch.ops.aten.cat](pieces, dim)


def compile_fx(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    wrap_inner: Callable[[Callable[..., Any]], Callable[..., Any]],
    region: str | None = None,
) -> Any:
    """Inductor's `compile_fx`, its compiler of single graphs wrapped; 2.13 and later can name the compiled region."""
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    named: dict[str, Any] = {"compile_region_name": region} if region is not None else {}
    if named and "compile_region_name" not in inspect.signature(inductor).parameters:
        named = {}
    return inductor(gm, inputs, wrap_inner(compile_fx_inner), config_patches=dict(patches), **named)


def let_marks_be_saved(joint_graph: torch.fx.Graph) -> None:
    """What an activation memory budget wants of a graph in which something is marked as MUST_SAVE. Before 2.15 torch
    saves nothing but inputs under 0, not even that: the least budget stands in for it. A region's (from 2.13) has to be
    on every node of the forward, and is not on those by which AOTAutograd writes state back."""
    from torch._functorch import config

    least, region = 1e-9, "_region_activation_memory_budget"  # torch.fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY
    budgets = {node.meta.get("custom", {}).get(region) for node in joint_graph.nodes} - {None}
    for node in joint_graph.nodes:
        if config.activation_memory_budget == 0:
            node.meta["memory_budget"] = least
        custom = node.meta.get("custom", {})
        written = node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
        if len(budgets) == 1 and (region in custom or written):
            node.meta["custom"] = {**custom, region: max(*budgets, least)}


@contextmanager
def saving_what_is_cut() -> Iterator[None]:
    """Have torch's partitioner save one of its minimum cuts under every budget between 0 and 1: of a list that is
    marked as MUST_SAVE its tensors. Before 2.15, where a graph leaves nothing to weigh, it saves inputs and marked
    nodes as they are, a list as such, or, where an input is a size, not at all (pytorch/pytorch#188014). The last cut
    is what 2.15 saves."""
    from torch._functorch import partitioners

    choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut

    def choose_a_cut(*args: Any, **kwargs: Any) -> list[fx.Node]:
        cuts: list[list[fx.Node]] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = cut(*args, **kwargs)
            cuts.append(found[0])
            return found

        with mock.patch.object(partitioners, "solve_min_cut", recorded):
            chosen = choose(*args, **kwargs)
        return chosen if not cuts or any(chosen is one for one in cuts) else cuts[-1]

    with mock.patch.object(partitioners, "choose_saved_values_set", choose_a_cut):
        yield


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


def guard_on_attribute(node: fx.Node, parameter: object, name: str) -> None:
    """Have Dynamo compare the type of an attribute of a graph's input, or that there is none, before each run of the
    graph that it is compiling. Where something else calls the backend there is nobody to compare."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    source: Any = getattr(node, "_dynamo_source", None)
    if source is None or TracingContext.try_get() is None:
        return
    attribute = AttrSource(source, name)
    if hasattr(parameter, name):
        install_guard(attribute.make_guard(GuardBuilder.TYPE_MATCH))
    elif "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        install_guard(source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
    else:  # 2.11
        install_guard(attribute.make_guard(GuardBuilder.HASATTR))


def is_gathered(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 gathers it for each forward and lets go of its memory behind."""
    return any(one.whole is parameter for one in gathered())


class Gathered(NamedTuple):
    """A parameter under FSDP2. A module holds its shards, or during its forward the whole."""

    shards: Sequence[torch.Tensor]
    whole: torch.Tensor | None  # None before it is gathered first


def gathered() -> Iterator[Gathered]:
    """Every parameter of this process that FSDP2 gathers."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        return
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        # The first is 2.15's name, the second what earlier releases have.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for one in (one for group in groups if group is not None for one in group.fsdp_params):
            shards = [getattr(one, name, None) for name in ("sharded_param", "_sharded_post_forward_param")]
            yield Gathered([s for s in shards if s is not None], getattr(one, "_unsharded_param", None))


def is_sharded_module(module: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called with it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flattened_module(module: torch.nn.Module) -> bool:
    """Whether it is one of FSDP's first version, whose layers hold views of one flat parameter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def inside_ddp() -> bool:
    """Whether the forward of a torch DistributedDataParallel runs, whose `_get_active_ddp_module` Dynamo asks as well.
    The graph that is being compiled is compiled anew where the answer is another."""
    guard_on("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", by_type=True)
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None  # type: ignore[no-untyped-call]


def before_export(note: Callable[[object], None]) -> None:
    """Call `note` with each model that `torch.export` is about to trace. Export asks a backend nothing, and has no
    hook, so its entry is replaced for good; there is no upstream issue yet."""
    from torch.export import _trace

    original = _trace._export

    @functools.wraps(original)
    def noted(mod: Any, *args: Any, **kwargs: Any) -> Any:
        note(mod)
        return original(mod, *args, **kwargs)

    _trace._export = noted


def options_of_compiled(module: torch.nn.Module, backend: object) -> Mapping[str, Any] | None:
    """The options of a module that torch.compile was called with for this backend, which Dynamo knows under wrappers;
    None of any other module."""
    from torch._dynamo.eval_frame import innermost_backend

    context = getattr(module, "dynamo_ctx", None)
    if context is None:  # what `module.compile()` leaves
        called = getattr(module, "_compiled_call_impl", None)
        context = inspect.getclosurevars(called).nonlocals.get("self") if inspect.isfunction(called) else None
    callback = getattr(context, "callback", None)
    found: Any = innermost_backend(callback) if callable(callback) else None
    if getattr(found, "compiler_fn", found) is not backend:
        return None
    return getattr(found, "kwargs", {}).get("options") or {}


def never_compile(function: Callable[..., Any]) -> None:
    """Let Dynamo run this function's frame as it is, where no other function's graph takes it in. What it calls is not
    touched (unlike under torch.compiler.disable, which also keeps it out of graphs)."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def in_uncompiled_frame() -> bool:
    """Whether Python code runs that torch.compile was asked to compile, and did not."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


@contextmanager
def traced_beside() -> Iterator[None]:
    """Compile a second graph for one that Dynamo hands over. AOTAutograd leaves a graph's metadata in Dynamo's context
    for its backward, which it compiles later, and DDP, where it cuts a graph, counts one graph a piece there: so the
    second has a context of its own."""
    from torch._guards import _TLS, TracingContext

    context = TracingContext.try_get()
    if context is None:
        yield
        return
    own = copy.copy(context)
    own.ddp_optimizer_ctx, own.fakify_first_call = None, False
    _TLS.tracing_context = own
    try:
        yield
    finally:
        _TLS.tracing_context = context
