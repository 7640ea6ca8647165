"""`rollout`: a view of a model that trains, for generation, whose stored weights follow the parameters."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_inductor import config, recipes
from te_inductor.api.options import Policy as OptionPolicy
from te_inductor.api.quantization import (
    MultipliedWeight,
    chosen_weights,
    multiplied_as_one,
    of_form,
    of_structure,
    shared_by,
    unwrapped,
)
from te_inductor.api.rollout_shards import AT_ONCE, GatheringRanks, Shards, copy_others, place_of, shards_of
from te_inductor.compat.fsdp import ShardedParameter, is_sharded, without_sharding
from te_inductor.config import Fallback
from te_inductor.diagnostics import Refusal
from te_inductor.errors import OptionError, StoredWeightError, wrong_type
from te_inductor.ops.stored_again import Rewriter, ask_finite, in_chunks
from te_inductor.ops.stored_weight import StoredWeight, as_parameter, show_stored
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.presentation.paths import layer_path
from te_inductor.recipes import Recipe
from te_inductor.runtime.weights import followed_weights
from te_inductor.runtime.weights.followed_weights import FollowedModules, FollowedView, FollowedWeights, ParameterPlace

ModelT = TypeVar("ModelT", bound=nn.Module)


def rollout(
    model: ModelT,
    recipe: str | Recipe = "nvfp4_weight_only",
    policy: OptionPolicy | None = None,
    fallback: Fallback = "warn",
) -> ModelT:
    """Returns a view of a model that trains, in evaluation mode: a module of the same class that generates with stored
    weights, as `quantize_` stores them, and shares all other parameters, and buffers, with the model.

    Args:
        recipe, policy, fallback: as `quantize_` takes them. `model` may be what `torch.compile` returned.

    Whenever the view runs, in eager code or under ``torch.compile(view, backend="te")``, weights whose parameters have
    changed are stored again, in place: they are the bits that `quantize_` would store then. Changes are seen that count
    in a tensor's version, as all of torch's operators do, steps of optimizers, and parameters that the model has
    replaced. Writes to `parameter.data`, and those of other kernels and collectives, are not: call
    `refresh_rollout(view)` behind them, and before a graph runs that another backend has compiled.

    Of a model that `fully_shard` has sharded each rank gets a view of the whole, with copies of what is not stored. What
    has changed is gathered: all ranks run their views, or call `refresh_rollout`, between the same steps.

    The view has no copy in high precision of what it stores: besides the model it takes 4.5 or 8 bits a weight. Hooks,
    configurations and other attributes are copied as they are. Move, cast and load the model, not its view.

    Raises:
        OptionError: `model` is no module, is sharded otherwise, or cannot be copied, or as of `quantize_`.
        RecipeError: unknown recipe, or one whose weights cannot be stored.
        StoredWeightError: a parameter has values that are not finite, here or when it is stored again.
        StateError: another rank did not come to where parameters are gathered.
        FallbackError: with ``fallback="error"``.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("rollout's model", model, "an nn.Module"))
    model = unwrapped(model)  # type: ignore[assignment]
    _check(model)
    options = config.parse({"policy": policy or {}, "fallback": fallback})
    policies, default = Policy(options.policy), recipes.resolve(recipe)
    view, source_of = _view(model)
    shards = shards_of(model)

    def refusal(held: MultipliedWeight, owners: Mapping[Tensor, Sequence[nn.Module]]) -> Refusal | None:
        is_shard = (source_of[held.module], held.parameter) in shards
        return of_structure(held, owners) if is_shard else of_form(held, owners)

    chosen, said = chosen_weights(view, policies, default, refusal)
    policies.tell(said, options.fallback)
    _store(chosen, source_of, shards, options.fallback)
    _share(source_of, shards)
    return view


def refresh_rollout(view: nn.Module) -> None:
    """Stores all weights of a view again, whether or not a change of their parameters was seen; of a sharded model on all
    ranks together, of which the others may run their views.

    Raises:
        OptionError: `view` is none that `rollout` returned.
        StoredWeightError: a parameter has values that are not finite.
        StateError: another rank did not come to where parameters are gathered.
    """
    found = followed_weights.of(view.parameters()) if isinstance(view, nn.Module) else {}
    if not found:
        raise OptionError(
            f"refresh_rollout of {type(view).__name__}, no weight of which follows a model, expected what"
            " te_inductor.rollout returned, with some stored weight"
        )
    for one, weights in found.items():
        one.look(weights, again=True)


def _check(model: nn.Module) -> None:
    shards = shards_of(model)
    for name, module in model.named_modules():
        path = layer_path(name) or type(module).__name__
        sharded = [
            key
            for key, one in module._parameters.items()
            if (isinstance(one, DTensor) and (module, key) not in shards) or hasattr(one, "ds_id")
        ]
        if type(module).__name__ == "FullyShardedDataParallel" or sharded:
            what = f"{path}.{sharded[0]}" if sharded else path
            raise OptionError(
                f"{what} is sharded over ranks, expected whole parameters, or fully_shard (FSDP2) alone, as a view generates"
                " on one rank; gather them in the engine that generates: te_inductor.stream_quantized(model, recipe) sends"
                " what quantize_ would store, one layer at a time"
            )
        offloaded = [key for key in module._parameters if (module, key) in shards and shards[module, key].is_offloaded]
        if offloaded:
            raise OptionError(
                f"{path}.{offloaded[0]} is sharded with an offload_policy, expected shards that stay on the device, where a"
                " rollout gathers them; call fully_shard without offload_policy=CPUOffloadPolicy()"
            )
        if any(isinstance(one, StoredWeight) for one in module._parameters.values()):
            raise OptionError(
                f"{path} has a stored weight, which no step changes, expected parameters in high precision that the view"
                " stores; generate with the model itself"
            )


def _view(model: ModelT) -> tuple[ModelT, dict[nn.Module, nn.Module]]:
    """A copy of the modules alone, whose tensors are the model's, and the module behind each of the copies."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(model)}
    try:
        for module in reversed(list(model.modules())):  # what is in a module before it
            compiled = module._modules.get("_orig_mod")
            if compiled is not None:  # a block that is compiled by itself
                memo[id(module)] = copy.deepcopy(compiled, memo)
            elif is_sharded(module):
                memo[id(module)] = copy.deepcopy(without_sharding(module), memo)
        view = copy.deepcopy(model, memo)
    except Exception as error:
        raise OptionError(
            f"rollout cannot copy the modules of the {type(model).__name__} ({type(error).__name__}: {error}), expected a"
            " model whose attributes copy.deepcopy takes"
        ) from error
    view.eval()
    view._apply = _Refusal("moved or cast")  # type: ignore[assignment]
    view.load_state_dict = _Refusal("loaded")  # type: ignore[assignment]
    view.requires_grad_ = _Refusal("frozen")  # type: ignore[assignment]
    return view, {memo[id(module)]: module for module in model.modules() if "_orig_mod" not in module._modules}


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
        yield from (leaf for leaf in torch.utils._pytree.tree_leaves(plain) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class _Refusal:
    """What a view does not do, as its tensors are the model's."""

    what: str

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise OptionError(
            f"a view of te_inductor.rollout is to be {self.what}, expected its model to be, whose tensors it shares; the"
            " view follows, or is made anew of a model that has moved"
        )


def _share(source_of: dict[nn.Module, nn.Module], shards: Shards) -> None:
    """Has modules without stored weights, and without copies, hold whatever the model's hold, also where it is
    replaced."""
    for module, source in source_of.items():
        module._buffers = source._buffers
        copied = any((source, name) in shards for name in source._parameters)
        if not copied and not any(isinstance(one, StoredWeight) for one in module._parameters.values()):
            module._parameters = source._parameters


@dataclass(frozen=True, eq=False)
class _Stored:
    """A weight of the view, and of the model."""

    view: MultipliedWeight
    source: MultipliedWeight
    recipe: Recipe
    shards: Shards

    @cached_property
    def shard(self) -> ShardedParameter | None:
        return self.shards.get((self.source.module, self.source.parameter))

    @property
    def parameter(self) -> Tensor:
        """The parameter that training updates."""
        return self.source.weight if self.shard is None else self.shard.sharded

    @property
    def rows(self) -> Tensor:
        """What this rank has of the weight."""
        return self.source.weight if self.shard is None else self.shard.rows

    @property
    def whole(self) -> Tensor:
        return self.source.weight.detach() if self.shard is None else self.shard.whole

    @property
    def place(self) -> ParameterPlace:
        """The place where the model holds it, if it is no shard."""
        return ParameterPlace(self.source.module._parameters, self.source.parameter)

    @property
    def places(self) -> list[ParameterPlace]:
        """The places where the model holds it and what is beside it."""
        held = self.source.module._parameters
        plain = [name for name, one in held.items() if one is not None and not self._is_shard(name)]
        mine = [] if self.shard is None else [place_of(self.shard)]
        return mine + [ParameterPlace(held, name) for name in plain]

    def _is_shard(self, name: str) -> bool:
        return (self.source.module, name) in self.shards

    @property
    def replaced(self) -> list[str]:
        """The names of what the model holds beside the weight, as a bias, and has replaced."""
        beside, found = self.view.module._parameters, self.source.module._parameters
        others = [name for name, one in beside.items() if name != self.source.parameter and one is not found[name]]
        return [name for name in others if not isinstance(beside[name], StoredWeight) and not self._is_shard(name)]

    def refusal(self, rows: Tensor, is_finite: bool) -> StoredWeightError | None:
        """Why the weight cannot be stored, of which this rank has these rows."""
        held, weight = self.view.weight, self.shard or rows
        if isinstance(rows, StoredWeight):
            return StoredWeightError(
                f"{self.source.names[0]} is stored as {rows.recipe.name} since its view was made, as by quantize_(model),"
                " expected a parameter in high precision, which the view stores; generate with the model itself, or leave"
                " it as it is and call te_inductor.quantize_(copy.deepcopy(model))"
            )
        if not is_finite:
            return StoredWeightError(
                f"{self.source.names[0]} has values that are not finite, expected finite ones, as a rollout stores the"
                " weight; look for the step that made them"
            )
        if self.shard is None and self.source.weight.is_inference():  # has no version
            return StoredWeightError(
                f"{self.source.names[0]} is an inference tensor, expected a normal one, whose changes a view sees; make the"
                " model outside of torch.inference_mode()"
            )
        is_first = not isinstance(held, StoredWeight)
        if not is_first and (held.shape, held.dtype, held.device) != (weight.shape, weight.dtype, weight.device):
            return StoredWeightError(
                f"{self.source.names[0]} is {list(weight.shape)} {weight.dtype} on {weight.device}, expected"
                f" {list(held.shape)} {held.dtype} on {held.device}, as when its view was made; call"
                " te_inductor.rollout(model) again"
            )
        return None


@dataclass(frozen=True, eq=False)
class _Group:
    """Weights that are one matrix to engines, or one weight."""

    weights: Sequence[_Stored]
    new: Sequence[_Stored]  # those that no other group stores

    @property
    def gathered_bytes(self) -> int:
        """How much memory it takes to have the weights whole."""
        shards = [one.shard for one in self.weights if one.shard is not None]
        return sum(shard.shape.numel() * shard.dtype.itemsize for shard in shards)

    def again(self) -> Iterator[tuple[StoredWeight, Tensor, Sequence[Tensor]]]:
        """What the view holds and is to be written, with the weight and all weights that are one matrix with it; at the
        first time the weight is stored here."""
        whole = [one.whole for one in self.weights]
        for one, weight in zip(self.weights, whole, strict=True):
            held = one.view.weight
            if one not in self.new:
                continue
            if isinstance(held, StoredWeight):
                yield held, weight, whole
            else:
                shared = shared_by(whole, one.recipe)
                setattr(
                    one.view.module, one.view.parameter, as_parameter(one.source.stored(one.recipe, shared, weight))
                )


def _store(
    chosen: Sequence[tuple[MultipliedWeight, Recipe]],
    source_of: dict[nn.Module, nn.Module],
    shards: Shards,
    fallback: Fallback,
) -> None:
    first: dict[Tensor, _Stored] = {}
    held: list[tuple[_Stored, Tensor]] = []
    ranks = GatheringRanks(shards, [f"{held.names[0]} {recipe}" for held, recipe in chosen]) if shards else None
    view = FollowedView(_Storing(Rewriter(fallback), ranks), FollowedModules(source_of.values()))
    for together in multiplied_as_one(chosen):
        group = [
            _Stored(held, replace(held, module=source_of[held.module]), recipe, shards) for held, recipe in together
        ]
        new = list({one.parameter: one for one in group if one.parameter not in first}.values())
        if new:
            places = [place for one in group for place in one.places]
            view.weights.append(FollowedWeights(view, places, _Group(group, new)))
        first |= {one.parameter: one for one in new}
        held += [(one, one.parameter) for one in group]
    stored = list(view.weights)
    copy_others(view, [(held.module, held.parameter) for held, _ in chosen], source_of, shards)
    view.look(view.weights)
    for weights in stored:
        followed_weights.add([one.view.weight for one in weights.group.new], weights)
    for one, source in held:
        setattr(one.view.module, one.view.parameter, first[source].view.weight)
        show_stored(one.view.module)
        if one is not first[source] and one.shard is None:
            view.modules.tied.append((one.place, first[source].place))


@dataclass(frozen=True, eq=False)
class _Storing:
    """Stores weights of a view whose parameters have changed."""

    rewriter: Rewriter
    ranks: GatheringRanks | None  # None: no other rank has a part of them

    @torch.no_grad()
    def __call__(
        self, changed: Sequence[FollowedWeights], others: Sequence[FollowedWeights], asked: bool
    ) -> list[FollowedWeights]:
        if self.ranks is not None:
            changed, others, asked = self._of_all_ranks(self.ranks, changed, others, asked)
        refused = self._refused(changed, others, asked)
        for weights in changed:
            if weights in refused:
                raise refused[weights]
        stored = [weights for weights in (*changed, *others) if weights not in refused]
        for chunk in in_chunks(stored, lambda weights: weights.group.gathered_bytes, AT_ONCE):
            self.rewriter(each for weights in chunk for each in weights.group.again())
        return stored

    def _of_all_ranks(
        self, ranks: GatheringRanks, changed: Sequence[FollowedWeights], others: Sequence[FollowedWeights], asked: bool
    ) -> tuple[list[FollowedWeights], list[FollowedWeights], bool]:
        """What has changed by the eyes of any rank, in the view's order."""
        view = changed[0].view.weights
        places = {weights: place for place, weights in enumerate(view)}
        told = ranks.all([[places[weights] for weights in some] for some in (changed, others)] + [asked])
        looked = {place for mine, _, _ in told for place in mine}
        rest = {place for _, mine, _ in told for place in mine} - looked
        seen, unseen = ([view[place] for place in sorted(some)] for some in (looked, rest))
        return seen, unseen, any(asked for *_, asked in told)

    def _refused(
        self, changed: Sequence[FollowedWeights], others: Sequence[FollowedWeights], asked: bool
    ) -> dict[FollowedWeights, StoredWeightError]:
        """Why some of them cannot be stored, on any rank. What is not looked at is left to who looks at it."""
        found, looked = dict[FollowedWeights, StoredWeightError](), set(changed)
        rows = {one: one.rows for weights in (*changed, *others) for one in weights.group.weights}
        wait = ask_finite(
            [each for each in rows.values() if not isinstance(each, StoredWeight)]
        )  # while the host goes on
        for weights in (*changed, *others):
            for one in weights.group.weights:
                # Who runs a compiled graph has read the view before, and has to be told.
                if (replaced := one.replaced) and not (asked and weights in looked):
                    found[weights] = _replaced(one, replaced[0])
                if replaced and weights in looked:
                    beside, held = one.view.module._parameters, one.source.module._parameters
                    beside.update({name: held[name] for name in replaced})
        finite = wait()
        with torch._C.DisableTorchFunctionSubclass():  # to ask for a stored weight's shape is a look, and slow
            for weights in (*changed, *others):
                errors = (one.refusal(rows[one], finite.get(rows[one], True)) for one in weights.group.weights)
                if error := next(filter(None, errors), None):
                    found.setdefault(weights, error)
        if self.ranks is None:
            return found
        view = changed[0].view.weights
        told = self.ranks.all([[view.index(weights), str(error)] for weights, error in found.items()])
        return {view[place]: StoredWeightError(text) for errors in told for place, text in errors} | found


def _replaced(one: _Stored, name: str) -> StoredWeightError:
    return StoredWeightError(
        f"{name} beside {one.source.names[0]} is another tensor than before, expected the same one with other values; call"
        " te_inductor.refresh_rollout(view) behind what puts other parameters into the model, as"
        " load_state_dict(assign=True)"
    )
