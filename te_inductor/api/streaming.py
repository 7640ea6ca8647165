"""`stream_quantized`: a trainer's parameters as the quantized tensors of a checkpoint, one layer at a time, for an engine
that runs; and `quantization_config`, what such an engine is started with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_inductor import config, recipes
from te_inductor.api.options import Policy as OptionPolicy
from te_inductor.api.quantization import (
    MultipliedWeight,
    adapters_of,
    chosen_weights,
    multiplied_as_one,
    of_structure,
    shared_by,
    state_of,
    unwrapped,
)
from te_inductor.api.written_checkpoints import CheckpointWriter, StoredTensor, writer_of
from te_inductor.errors import OptionError, StoredWeightError, wrong_type
from te_inductor.ops.stored_weight import StoredWeight, kind_of
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.presentation.paths import layer_path
from te_inductor.recipes import Recipe


def stream_quantized(
    model: nn.Module,
    recipe: "str | Recipe",
    policy: OptionPolicy | None = None,
    *,
    format: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Returns the model's tensors as a checkpoint has them, ``(name, tensor)``, linear layers and experts quantized: what
    an engine's `load_weights` takes, in the order of the model's layers. Call it anew for each update; the model and its
    parameters stay as they are.

    Args:
        recipe, policy: as `te_inductor.quantize_` takes them; the tensors are those that it would store, bit for bit.
        format: the `quant_method` that the engine was started with, "compressed-tensors" or "fp8"; None: that which
            `save_pretrained` would write.

    One layer at a time is gathered, quantized and let go of, or the few that share a scale. Where FSDP2 or tensor
    parallelism shards parameters, all ranks iterate over the whole stream. Tied weights come once, under their first
    name; layers that the model has fused stay fused. Names are the model's own, without what wrappers and adapters add.

    Raises:
        OptionError: `model` is no module, an option is wrong, parameters are sharded by FSDP1 or by DeepSpeed's stage 3, or
            adapters are not merged.
        RecipeError: unknown recipe, or one whose weights cannot be stored.
        StoredWeightError: no format has the weights, or, when its turn comes, one has values that are not finite.
    """
    plan = _plan(model, recipe, policy, format)
    return _tensors(plan)


def quantization_config(
    model: nn.Module,
    recipe: "str | Recipe",
    policy: OptionPolicy | None = None,
    *,
    format: str | None = None,
) -> dict[str, Any]:
    """The `quantization_config` of what `stream_quantized` returns for the same arguments, as config.json has it: for an
    engine that starts from the model's configuration and gets its weights from the stream.

    Raises:
        OptionError, RecipeError, StoredWeightError: as `stream_quantized`, but for values.
    """
    return _plan(model, recipe, policy, format).writer.configuration


@dataclass(frozen=True)
class _Plan:
    writer: CheckpointWriter
    chosen: dict[Tensor, list[tuple[MultipliedWeight, Recipe]]]  # what is stored together with a parameter
    names: dict[Tensor, str]  # of parameters and buffers, each once


def _plan(model: nn.Module, recipe: "str | Recipe", policy: OptionPolicy | None, format: str | None) -> _Plan:
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("stream_quantized's model", model, "an nn.Module"))
    model = _innermost(model)
    _check(model)
    default = recipes.resolve(recipe)
    if default is None:
        raise OptionError(
            "stream_quantized's recipe is 'none', expected one whose weights are stored; model.state_dict()"
        )
    kind_of(default)
    options = config.parse({"policy": policy or {}})
    chosen, _ = chosen_weights(model, Policy(options.policy), default, of_structure)
    names = _names(model)
    once = list({held.weight: (held, wanted) for held, wanted in reversed(chosen)}.values())[::-1]
    together = {held.weight: group for group in multiplied_as_one(once) for held, _ in group}
    stored = [
        StoredTensor(names[held.weight], wanted, tuple(held.weight.shape), held.weight.dim() == 3 and held.transposed)
        for held, wanted in once
    ]
    stored += [
        StoredTensor(name, one.recipe, tuple(one.shape), bool(one.more and one.more[0]))
        for one, name in names.items()
        if isinstance(one, StoredWeight)
    ]
    if not stored:
        raise OptionError(
            f"the policy leaves no layer of the {type(model).__name__} to {default.name!r}, expected some"
        )
    return _Plan(writer_of(model, stored, format), together, names)


def _innermost(model: nn.Module) -> nn.Module:
    """The model inside of what compiles it, copies it to ranks, or has adapters."""
    model = unwrapped(model)
    while callable(base := getattr(model, "get_base_model", None)):
        model = unwrapped(base())
    return model


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        path = layer_path(name) or type(module).__name__
        if type(module).__name__ == "FullyShardedDataParallel":
            raise OptionError(
                f"{path} is sharded by FSDP1, whose parameters are no tensors of their layers, expected fully_shard (FSDP2);"
                " stream inside of FullyShardedDataParallel.summon_full_params"
            )
        if any(hasattr(one, "ds_id") for one in module._parameters.values()):
            raise OptionError(
                f"{path} is sharded by DeepSpeed's stage 3, expected whole parameters or FSDP2; stream inside of"
                " deepspeed.zero.GatheredParameters"
            )
        adapted = (
            isinstance(getattr(module, "base_layer", None), nn.Module) and getattr(module, "merged", True) is False
        )
        if adapted and getattr(module, "active_adapters", None) and not getattr(module, "disable_adapters", False):
            raise OptionError(
                f"{path} has an adapter that is not merged, which the stream would leave out, expected it in the weight;"
                " call model.merge_adapter() before and model.unmerge_adapter() behind it"
            )


def _names(model: nn.Module) -> dict[Tensor, str]:
    """The parameters and the buffers that a state_dict has, each with its first name."""
    names, beside = dict[Tensor, str](), adapters_of(model)
    for path, module in model.named_modules():
        if module in beside:
            continue
        for key, tensor in state_of(module).items():
            names.setdefault(tensor, layer_path(f"{path}.{key}"))
    return names


def _tensors(plan: _Plan) -> Iterator[tuple[str, Tensor]]:
    done = set[Tensor]()
    for tensor, name in plan.names.items():
        if isinstance(tensor, StoredWeight):
            yield from plan.writer.tensors(name, tensor)
        elif tensor not in plan.chosen:
            yield name, _whole(tensor)
        elif tensor not in done:
            together = plan.chosen[tensor]
            done |= {held.weight for held, _ in together}
            yield from _stored(plan, together)


def _stored(plan: _Plan, together: list[tuple[MultipliedWeight, Recipe]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of weights that are one matrix to engines, or of one weight."""
    names = [plan.names[held.weight] for held, _ in together]
    whole = [_whole(held.weight) for held, _ in together]
    for name, weight in zip(names, whole, strict=True):
        if not bool(weight.isfinite().all()):
            raise StoredWeightError(
                f"{name} has values that are not finite, expected finite ones, as the engine has its layer quantized; look"
                " for the step that made them"
            )
    shared = shared_by(whole, together[0][1])
    for (held, recipe), name in zip(together, names, strict=True):
        weight = whole.pop(0)
        made = held.stored(recipe, shared, weight)
        with torch.no_grad():
            tensors = list(plan.writer.tensors(name, made))
        del weight, made
        yield from tensors


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
