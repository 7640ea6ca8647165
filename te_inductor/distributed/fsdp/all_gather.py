"""`low_precision_all_gather`: FSDP2 gathers a model's weights in FP8."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from te_inductor import config, recipes, targets
from te_inductor.api.quantization import DTYPES, is_router
from te_inductor.compat.fsdp import ShardedParameter, sharded_parameters
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.fsdp.rounds import Rounds, Weight
from te_inductor.distributed.fsdp.scales import KINDS
from te_inductor.errors import GatherError, OptionError, RecipeError, wrong_type
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.presentation.paths import grouped, names_of, without_wrappers
from te_inductor.recipes import DelayedScaling, Float8RowwiseScaling, Quantizer, Recipe
from te_inductor.runtime.hooks import tell_after_each


def low_precision_all_gather(
    model: nn.Module,
    recipe: object = "auto",
    policy: Mapping[Any, object] | None = None,
    fallback: str = "warn",
) -> nn.Module:
    """Have FSDP2 gather the weights of `nn.Linear` modules in FP8, in the model that `fully_shard` has sharded; returns
    the model. Call it on all ranks, before the first forward.

    Args:
        recipe: "delayed", "current" or "block"; a name or an instance, the one that the model is compiled with.
        policy: as the compile option: {module-path glob or function: recipe or "none"}, the first that matches wins.
        fallback: "warn", "error" or "silent", where a layer's weight cannot be gathered so or an entry matches nothing.

    Each rank casts its own rows, once a forward; the backward gathers the same bytes. Parameters stay the DTensors that
    FSDP2 made: the optimizer, `state_dict` and checkpoints see no difference. What is gathered is a weight that trains
    for ``torch.compile(backend="te")``, and reads as the values that it stands for anywhere else.

    An error leaves the model as it was.

    Raises:
        GatherError: `model` has no weights that FSDP2 shards, it was called already, or ranks would gather other
            weights.
        OptionError: `model` is no module, `policy` or `fallback` is wrong, or a policy function failed.
        RecipeError: unknown recipe, or one whose weights cannot be gathered.
        FallbackError: with ``fallback="error"``.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("low_precision_all_gather's model", model, "an nn.Module"))
    options = config.parse({"policy": policy or {}, "fallback": fallback})
    default = recipes.resolve(recipe)
    policies = Policy(options.policy)
    for one in (default, *(entry.recipe for entry in policies.entries)):
        _check_recipe(one)
    shards = list(sharded_parameters(model))
    _check_model(shards)
    weights, said = _chosen(model, shards, policies, default)
    policies.tell(said, options.fallback, " that FSDP2 shards")
    _check_agreement(shards, weights)
    _install(model, weights)
    return model


def _chosen(
    model: nn.Module, shards: Sequence[ShardedParameter], policies: Policy, default: Recipe | None
) -> tuple[list[Weight], list[str]]:
    """The weights that are to be gathered so, and what is to be said of the others."""
    paths = {module: without_wrappers(name) for name, module in model.named_modules()}
    parents = {child: module for module in model.modules() for child in module.children()}
    weights, said, quantizers = list[Weight](), list[str](), dict[Recipe, Quantizer]()
    for shard in shards:
        names = [paths[module] for module, name in shard.modules if isinstance(module, nn.Linear) and name == "weight"]
        if not names or len(shard.shape) != 2:
            continue
        entry = policies.of([one for name in names for one in names_of(name)], (None, *shard.shape))
        parent = parents.get(shard.modules[0][0], model)
        wanted = entry.recipe if entry else None if is_router(names[0], parent) else default
        if wanted is None:
            continue
        refusal = _refusal(shard, wanted, len(names))
        if refusal is None:
            weights.append(Weight(names[0], shard, wanted, quantizers.setdefault(wanted, wanted.slots().weight)))
        else:
            said.append(f"te_inductor: {names[0] or '(root)'} is gathered in high precision: {refusal}")
    return weights, said


def _check_recipe(recipe: Recipe | None) -> None:
    """Whether weights can be cast before they are gathered, and serve all GEMMs that read them."""
    if recipe is None:
        return
    expected = "expected 'delayed', 'current' or 'block'"
    if isinstance(recipe, Float8RowwiseScaling):
        raise RecipeError(
            "recipe 'rowwise' cannot gather weights in low precision: fprop reads a weight with a scale for each of its"
            f" rows, dgrad with one for each of its columns, and neither can be made of the other; {expected}"
        )
    if type(recipe) not in KINDS:
        raise RecipeError(f"recipe {recipe.name!r} cannot gather weights in low precision, {expected}")
    if not recipe.slots().weight.granularity.transposes:
        raise RecipeError(
            "Float8BlockScaling.w_block_scaling_dim is 1, expected 2 to gather weights in low precision: dgrad reads the"
            " transpose of what was gathered, whose scales are those of square blocks alone"
        )
    if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
        raise RecipeError(
            "DelayedScaling.reduce_amax is False, expected True to gather weights in low precision: all ranks cast"
            " their rows of a weight with one scale"
        )


def _check_model(shards: Sequence[ShardedParameter]) -> None:
    if not shards:
        raise GatherError(
            "the model has no parameters that FSDP2 shards, expected a model that"
            " torch.distributed.fsdp.fully_shard was called with; call low_precision_all_gather after it"
        )
    if any(shard.is_hooked for shard in shards):
        raise GatherError(
            "another all-gather than FSDP2's own is set for the model's parameters already, expected none; call"
            " low_precision_all_gather once, and shard parameters that are no tensor subclasses of other libraries"
        )
    if any(shard.gathered is not None for shard in shards):
        raise GatherError(
            "FSDP2 has gathered the model's parameters before, expected a model that has not run yet; call"
            " low_precision_all_gather after fully_shard, before the first forward"
        )
    for shard in shards:
        found = shard.group_refusal()
        if found is not None:
            raise GatherError(
                f"fully_shard was called with {found[0]}, expected {found[1]}, as FSDP2 gathers nothing but its own"
                " tensors then"
            )


def _refusal(shard: ShardedParameter, recipe: Recipe, layers: int) -> Refusal | str | None:
    """Why a weight is gathered as it was."""
    others = [type(module).__name__ for module, _ in shard.modules if not isinstance(module, nn.Linear)]
    if others:
        return Refusal("it is also that of a module of class %s", others[0])
    if shard.dtype not in DTYPES:
        return Refusal("dtype %s is not float32, bfloat16 or float16", str(shard.dtype).removeprefix("torch."))
    found = shard.refusal() or targets.of(shard.device).refusal or requirements.sizes(*shard.shape)
    if found:
        return found
    alignment = recipe.slots().weight.granularity.alignment
    if any(size % alignment for size in shard.shape):
        return Refusal("N=%d, K=%d are not multiples of %d, and nothing is padded", *shard.shape, alignment)
    return None


def _check_agreement(shards: Sequence[ShardedParameter], weights: Sequence[Weight]) -> None:
    """Checks over all groups of ranks that hold parts or copies of the model's parameters, each once."""
    groups = {id(group): (group, shard.device) for shard in shards for group in _groups(shard)}
    for group, device in groups.values():
        own = [one for one in weights if group in _groups(one.shard)]
        _check_ranks(group, [f"{one.name} {tuple(one.shard.sharded.shape)} {one.recipe}" for one in own], device)


def _groups(shard: ShardedParameter) -> list[Any]:
    return [group for group in (shard.ranks, shard.replicas, shard.parallel) if group is not None]


def _install(model: nn.Module, weights: Sequence[Weight]) -> None:
    by_group = grouped(weights, lambda one: (one.shard.ranks, one.shard.parallel, one.shard.device, one.shard.dtype))
    rounds = [Rounds(ranks, own, parallel) for (ranks, parallel, *_), own in by_group.items()]
    for weight in weights:
        weight.attach()
        for module, _ in weight.shard.modules:
            module.register_load_state_dict_post_hook(functools.partial(_after_load, weight))
    _ROUNDS.update(rounds)
    tell_after_each(_after_step)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:  # a checkpoint that runs it again
            return
        for one in rounds:
            one.before_forward(torch.is_grad_enabled())

    if rounds:
        model.register_forward_pre_hook(before_forward, prepend=True)


_ROUNDS: WeakSet[Rounds] = WeakSet()


def _after_step(optimizer: object) -> None:
    """Notes, behind a step of any optimizer, that weights may have changed."""
    for one in list(_ROUNDS):
        one.weights_changed()


def _after_load(weight: Weight, module: nn.Module, keys: object) -> None:
    """Runs behind FSDP's own hook, which may put another tensor in the shard's place."""
    weight.attach()
    weight.rounds.weights_changed()


def _check_ranks(group: Any, weights: Sequence[str], device: torch.device) -> None:
    """Compare what each weight is called and cast to, before any is gathered: ranks that differ would read each other's
    bytes as something else, or wait for ever. A rank that does not come keeps the others waiting for the timeout of the
    process group, which is an error.

    Raises:
        GatherError: ranks differ.
    """
    digest = int.from_bytes(hashlib.sha256("\n".join(weights).encode()).digest()[:7], "big")
    own = torch.tensor([len(weights), digest], dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    told = [tuple(one.tolist()) for one in found]
    if len(set(told)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    numbers = ", ".join(f"rank {rank}: {number}" for rank, (number, _) in zip(ranks, told, strict=True))
    what = "numbers of weights" if len({number for number, _ in told}) > 1 else "weights, though as many"
    raise GatherError(
        f"ranks would gather other {what} in low precision ({numbers}), expected the same names, shapes and recipes on"
        " all ranks; call low_precision_all_gather with the same model, recipe and policy on each"
    )
