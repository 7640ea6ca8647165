"""`torch.compile(model, backend="te")`: read this file first.

Dynamo hands `te` a graph of the model's forward, before autograd. The passes of `passes/pre_grad` find its linear layers,
give each a recipe, check what can run, and rewrite those to `te_inductor.layers`. AOTAutograd traces that op into
fine-grained forward and backward graphs (`ops/`), on which `passes/joint` and `passes/post_grad` run, and Inductor lowers
those (`lowerings/`) beside everything else, so that quantization fuses with the kernels that produce its input. Templates
(`templates/`) are the kernels that Inductor cannot write.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx, nn

import te_inductor.ops  # noqa: F401 (first: Note [First uses in threads])
from te_inductor import compat, config, recipes
from te_inductor.config import Options
from te_inductor.diagnostics import CUT_BY_DDP, NEGATED, announce, log, say, uncompiled
from te_inductor.distributed import amax_groups
from te_inductor.errors import NOT_EXPORTED, NOT_KEPT, NOT_SAVED, TEInductorError
from te_inductor.kernels import cutlass_tables
from te_inductor.ops.stored_weight import StoredWeight
from te_inductor.passes import effects, pre_grad
from te_inductor.passes.graph.module_path import path_of
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide.between_ranks import compare_compiles
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.rewrite import first_step
from te_inductor.presentation.progress import patience
from te_inductor.presentation.report import Report, Unmet
from te_inductor.recipes import regions
from te_inductor.recipes.backward_precision import resolve_backward
from te_inductor.runtime import compiled_graphs
from te_inductor.runtime.extra_inputs import bind
from te_inductor.runtime.omitted_logits import leave_out
from te_inductor.runtime.state import misfits
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.followed_weights import following, is_followed
from te_inductor.templates.cutlass import build

# Sums over the experts of a row, which gather rows: as a reduction, Inductor (2.11, 2.13) gives neighbouring threads
# neighbouring experts, and reads rows that lie apart a few bytes at a time, at a third of what memory gives. It unrolls
# sums of fewer than 8.
MOST_EXPERTS_OF_A_ROW = 16
# Casts read tensors of up to so many ops: with more, Inductor (30 on GPUs) writes one before others read it, in fp32.
# The gradient of Gemma's GELU by tanh was written so, 448 MiB of 8192 x 14336, in front of the kernel that casts it.
MOST_OPS_OF_A_TENSOR = 48


@build.kept_open()
def te(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The Dynamo backend. `options` as in `config.py`; what is not ours goes to Inductor.

    Raises:
        OptionError, RecipeError: the options are wrong.
        FallbackError: with ``options={"fallback": "error"}``, where a site does not run as asked.
        TEInductorError: torch is to save what is returned, by `aot_compile` or in Dynamo's cache of functions.
    """
    if compat.compiles_ahead():
        raise TEInductorError(NOT_SAVED)
    _check_caches()
    regions.note_compile()
    parsed = parse(mode, options)
    plan = Plan(gm, parsed, example_inputs)
    originals = _set_aside(plan.graph_modules())
    plan.outcome.report = found = run_passes(plan)
    if plan.reads_active_region:
        regions.guard_on_active()
    if found.failure is not None:
        _give_up(plan, originals)
    compat.trace_artifact("te_inductor_report", lambda: json.dumps(found.to_dict(), indent=1, default=str))
    announce(found if found.failure is None else _without_us(plan, found), parsed.fallback)
    if plan.is_ours and compat.is_cut_by_ddp(gm):
        _note_cut(parsed.fallback)
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        _start_workers()
    inductor = _inductor(plan, name)
    if any(isinstance(x, torch.Tensor) and x.is_neg() for x in example_inputs):  # Dynamo guards on it
        say(NEGATED, parsed.fallback)
        inductor = _interpreted
    with patience(f"compiling a graph of {len(gm.graph.nodes)} operations"):
        if found.failure is not None or not (plan.candidates or any(site.is_changed for site in plan.attention)):
            compiled = inductor(gm, example_inputs)
        else:
            compiled = _compile_or_restore(plan, inductor, originals)
    compare_compiles(plan)
    compiled_graphs.note(plan.outcome.report, plan.outcome.weights)
    looks = [place for place, one in enumerate(example_inputs) if isinstance(one, StoredWeight) or is_followed(one)]
    return compat.inside_ddp_again(following(compiled, looks))


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Options, with every recipe and the group resolved and the user's tables read, so that a wrong one is an error even
    where no site would use it."""
    cutlass_tables.check()
    parsed = config.parse(options, mode)
    recipe = recipes.resolve(parsed.recipe, parsed.recipe_called("recipe"))
    named = parsed.recipe_called("policy")
    policy = tuple((glob, recipes.resolve(spec, named) or "none") for glob, spec in parsed.policy)
    backward = resolve_backward(parsed.backward, parsed.called("backward"))
    group = amax_groups.resolve(parsed.amax_group, parsed.called("amax_group"))
    for effect in effects.asked(parsed):
        effect.check(parsed)
    for text in config.unknown_variables():
        say(f"te_inductor: {text}", parsed.fallback)
    return replace(parsed, recipe=recipe or "none", policy=policy, backward=backward, amax_group=group)


def run_passes(plan: Plan, passes: Sequence[Callable[[Plan], None]] | None = None) -> Report:
    """Run the passes, by default all. A failure of ours is part of the report, never an exception: the graph compiles
    without us. What the user has to mend, such as a factory of quantizers, is raised."""
    plan.outcome.report.unmet.extend(_options_inside(plan.options))
    try:
        for step in effects.under(plan.options, pre_grad.PASSES if passes is None else passes):
            log.debug("%s", step.__name__)
            step(plan)
    except TEInductorError:
        raise
    except Exception:
        return _failed(plan.outcome.report, "a pass failed", traceback.format_exc())
    return plan.outcome.report


def rehearse(plan: Plan, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Trace a plan's graph into those of its forward and backward as its compile does, with Inductor's compiler of
    single graphs replaced by what `around` makes of it. The plan's graph is as it was behind it, and its report has what
    only those graphs tell. No state is made, and no other rank learns of it."""
    originals = _set_aside(plan.graph_modules())
    try:
        plan.outcome.report = run_passes(plan, pre_grad.REHEARSED)
        inputs = [*plan.inputs, *(example for kind in plan.outcome.extra_inputs for example in kind.examples)]
        with compat.traced_beside(), compat.unwinding_transforms(), compat.without_graph_cache():
            _inductor(plan, None, around)(plan.gm, inputs)
    finally:
        _give_up(plan, originals)


def _options_inside(options: Options) -> Iterator[Unmet]:
    """What was asked for parts of the model that are compiled themselves, and that Dynamo has traced into this graph."""
    for name, given in compat.compiled_inside(te):
        inner, asked = parse(None, given), [option for option in _OF_LAYERS if given.get(option) is not None]
        reason = (
            "Dynamo traces a compiled part into the graph of what calls it, with that one's options; say it there by the"
            " option 'policy', by te_inductor.autocast around the part, or compile the parts alone"
        )
        lost = [option for option in asked if getattr(inner, option) != getattr(options, option)]
        yield from (Unmet(option, path_of(name), reason) for option in lost)


_OF_LAYERS = [option for option in config.OWN_OPTIONS if option not in ("fallback", "mode")]


def _failed(report: Report, reason: str, failure: str) -> Report:
    """The report of a graph in which nothing came to run in low precision."""
    sites = [
        site if site.kernel == "high_precision" else replace(site, kernel="high_precision", reason=reason)
        for site in report.sites
    ]
    return replace(report, sites=sites, attention=[], failure=failure, flops=replace(report.flops, low=0))


_cut_is_noted = False


def _note_cut(fallback: str) -> None:
    """Say once what it costs that DDP cuts graphs. All sites run as asked, so that nothing is an error."""
    global _cut_is_noted
    if not _cut_is_noted:
        _cut_is_noted = True
        say(CUT_BY_DDP, "silent" if fallback == "silent" else "warn")


def _start_workers() -> None:
    """Starts Inductor's workers, which compile Triton's kernels. It does so too, but late: they take seconds, in which
    this process imports the rest of it and traces."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


class Inductor(Protocol):
    """Compiles a graph. Where it may, it generates no code for a graph that runs only a few times, and interprets it,
    as do the ranks with which it has to `agree`."""

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        runs_seldom: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> Callable[..., Any]: ...


def _inductor(
    plan: Plan, name: str | None, around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner
) -> Inductor:
    """Inductor with the mode's options, the user's, our lowerings, and our passes on its graphs. A graph that holds
    nothing of ours gets plain Inductor: it runs as it would without this backend, no faster and no slower."""
    options = plan.options
    from torch._inductor import config as inductor

    from te_inductor import lowerings
    from te_inductor.ops import flops
    from te_inductor.passes.graph import interpreted
    from te_inductor.passes.graph.unkept import heeding

    patches = dict(torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None).config)
    theirs = patches.get("custom_partitioner_fn", inductor.custom_partitioner_fn)
    asked = effects.asked(options)
    if not (plan.is_ours or asked):
        return lambda gm, inputs, *_: compat.compile_fx(gm, inputs, patches, name, around)
    for effect in asked:
        effect.tell(plan, patches)
    wrap_inner = lowerings.install(options.fallback, rows_alone=any(effect.rows_alone for effect in asked))
    compat.patch("torch._inductor.config.loop_index_inversion_in_fusion", False, on=patches)
    for option, limit in _limits(plan).items():
        patches.setdefault(option, limit)
    _add_passes(patches)

    def compile(
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        runs_seldom: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> Callable[..., Any]:
        seldom = partial(interpreted.interpreting, agree=agree) if runs_seldom else lambda inner: inner
        cached: AbstractContextManager[None] = interpreted.kept(agree) if runs_seldom else nullcontext()
        try:
            with flops.weighed(), compat.saving_a_minimum_cut(), cached:
                return compat.compile_fx(
                    gm, inputs, patches, name, lambda inner: around(heeding(seldom(wrap_inner(inner))))
                )  # type: ignore[no-any-return]
        except Exception as error:
            if not _is_of_files(error):
                patches["custom_partitioner_fn"] = theirs  # the user's graph, which is next, runs as written
                raise
            failure = traceback.format_exc()
        # No graph would compile, so none is tried again: this one runs as it is, by the eager runtime.
        say(uncompiled(failure), options.fallback)
        return gm.forward

    return compile


def _interpreted(
    gm: fx.GraphModule, inputs: Sequence[Any], runs_seldom: bool = False, agree: Callable[[bool], bool] | None = None
) -> Callable[..., Any]:
    """The graph as it is, by the eager runtime: Inductor's code reads the memory of a view that negates as it is."""
    return gm.forward


def _add_passes(patches: dict[str, Any]) -> None:
    """Has Inductor run our passes, behind the user's."""
    from torch._inductor import config as inductor

    from te_inductor.passes import joint, post_grad
    from te_inductor.passes.graph.custom_pass import GraphPass

    for place, passes in (
        ("joint_custom_pre_pass", joint.PASSES),
        ("joint_custom_post_pass", joint.LAST_PASSES),
        ("post_grad_custom_pre_pass", post_grad.PASSES),
    ):
        patches[place] = GraphPass(patches.get(place, getattr(inductor, place)), passes)


def _limits(plan: Plan) -> dict[str, int]:
    """Limits of Inductor's that suit graphs of ours, unless the user has set them."""
    found = {}
    weights = [value(candidate.match.weight) for candidate in plan.candidates]
    if plan.experts:
        found["unroll_reductions_threshold"] = MOST_EXPERTS_OF_A_ROW + 1
    elif any(weight.is_cuda for weight in weights):
        found["realize_opcount_threshold"] = MOST_OPS_OF_A_TENSOR
    if any(weight.is_cpu for weight in weights) and (bits := compat.width_of_right_vectors()) is not None:
        found["cpp.simdlen"] = bits
    return found


def _is_of_files(error: BaseException | None) -> bool:
    """Whether the operating system refused a file or folder: a cache that cannot be written, a full disk."""
    while error is not None and not isinstance(error, OSError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error is not None


def _compile_or_restore(
    plan: Plan,
    inductor: Inductor,
    originals: Mapping[fx.GraphModule, fx.Graph],
) -> Callable[..., Any]:
    """Compile the rewritten graph; if that fails, the graph as the user wrote it, with the traceback in a warning."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported

    try:
        with compat.unwinding_transforms():
            inputs = [*plan.inputs, *(example for kind in plan.outcome.extra_inputs for example in kind.examples)]
            first = _first_step(plan, inductor, inputs)
            compiled = bind(inductor(plan.gm, inputs), plan.outcome.extra_inputs, first)
            for effect in effects.asked(plan.options):
                effect.finish(plan.options, plan.outcome.report)
            return leave_out(compiled, plan.outcome.omitted)
    except (RestartAnalysis, SkipFrame, Unsupported, TEInductorError):
        raise  # Dynamo's own control flow, and what the user asked to be told
    except Exception:
        failure = traceback.format_exc()
        _give_up(plan, originals)
        compiled = inductor(plan.gm, plan.inputs)  # a graph that fails without us too is not our failure
    plan.outcome.report = _failed(plan.outcome.report, "its compile failed", failure)
    announce(_without_us(plan, Report(failure=failure)), plan.options.fallback)
    return compiled


def _first_step(plan: Plan, inductor: Inductor, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """What runs where delayed scaling has no history: Note [A first step]."""
    state = plan.outcome.state
    if state is None:
        return None
    graph = first_step.of(plan.gm)
    if not state.may_lack_history(plan.inputs):
        return state.count_first_steps(plan.gm, graph.forward, many=False)
    many = state.has_many_first_steps(plan.inputs)
    with compat.traced_beside():
        first = inductor(graph, inputs, not many, state.agree)
    return state.count_first_steps(plan.gm, first, many)


def _without_us(plan: Plan, report: Report) -> Report:
    """The report of a graph that is compiled as the user wrote it: autograd has the gradients of all its layers."""
    if plan.options.wgrad == "grad":
        return report
    reason = "the graph is compiled without low precision, so that weight gradients go to autograd"
    asked = [candidate.fqn for candidate in plan.candidates if candidate.recipe is not None]
    return replace(report, unmet=[Unmet("wgrad", fqn, reason) for fqn in asked])


def _set_aside(modules: Sequence[fx.GraphModule]) -> dict[fx.GraphModule, fx.Graph]:
    """Give each module a copy of its graph to be rewritten, and return its own: what `_restore` puts back, and what
    Dynamo reads again behind the backend, to write the call, whose arguments are the placeholders."""
    originals = {module: module.graph for module in modules}
    for module, graph in originals.items():
        module.graph = first_step.twin(graph)
    return originals


def _give_up(plan: Plan, originals: Mapping[fx.GraphModule, fx.Graph]) -> None:
    """Go back to the graph as the user wrote it, and let no other rank wait for the rewritten one."""
    for kind in plan.outcome.extra_inputs:
        kind.withdraw()
    _restore(originals)


def _restore(originals: Mapping[fx.GraphModule, fx.Graph]) -> None:
    for module, graph in originals.items():
        module.graph = graph  # recompiles the module


def reset() -> None:
    """What `torch._dynamo.reset()` asks of a backend: forget the CUDA graphs recorded so far, the copies of
    weights, and which graphs a guard had compiled anew."""
    cached_weights.forget()
    compiled_graphs.forget()
    misfits.forget()
    cudagraph_trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if cudagraph_trees is not None:
        cudagraph_trees.reset_cudagraph_trees()


def _check_caches() -> None:
    """Raise where Dynamo caches whole functions. It looks for one before it calls a backend, so that this is also asked
    when a backend of this name is."""
    if torch._dynamo.config.caching_precompile:
        raise TEInductorError(NOT_KEPT)


_check_caches()
te.reset = reset  # type: ignore[attr-defined]
compat.before_export(lambda model: note_export(model, te))
compat.let_threads_register("te")
compat.let_gradients_differ("te_inductor")

if torch.cuda.is_initialized():  # who asks for a backend will compile
    _start_workers()


_COMPILED = f'te_inductor: torch.export leaves out backend="te" and its recipe, so that {NOT_EXPORTED}'


def note_export(model: object, backend: object) -> None:
    """Say that the export of `model`, which begins, has no low precision: once an export, as the options of the first
    of its compiled modules want it.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        options: Any = compat.options_of_compiled(module, backend)
        if options is not None:
            say(_COMPILED, options.get("fallback", "warn"))
            return
    regions.export_begins()
