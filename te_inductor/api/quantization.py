"""`quantize_`: store the weights of a model's linear layers in low precision, once, for inference."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import config, lowerings, recipes
from te_inductor.diagnostics import HIDDEN, Refusal, say
from te_inductor.errors import OptionError, wrong_type
from te_inductor.ops import stored_weight
from te_inductor.ops.stored_weight import StoredWeight, kind_of, store
from te_inductor.passes.graph.module_path import without_wrappers
from te_inductor.passes.pre_grad.decide import policy as policies
from te_inductor.recipes import Recipe

# AOTInductor compiles exported programs without our backend, whose first compile would register them.
stored_weight.before_export.append(functools.cache(lambda: lowerings.install()))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_(
    model: nn.Module,
    recipe: object = "nvfp4_weight_only",
    policy: Mapping[Any, object] | None = None,
    fallback: str = "warn",
) -> nn.Module:
    """Replace the weights of `nn.Linear` modules by `StoredWeight`s, in place; returns the model.

    Args:
        recipe: "nvfp4_weight_only" (4.5 bits a weight; activations as they are), or "rowwise", "current", "block" (8 bits;
            activations are cast as the recipe says); a name or an instance.
        policy: as the compile option: {module-path glob or function: recipe or "none"}, the first that matches wins; a
            function is given None for M.
        fallback: "warn", "error" or "silent", where a layer's weight cannot be stored so or an entry matches nothing.

    The model runs eagerly, by dequantizing, and fast under ``torch.compile(model, backend="te")``. Keys of its
    state_dict stay; it loads what was saved of a quantized model, and of one in high precision. It cannot be trained;
    gradients flow through it to its inputs, and to adapters. `torch.export` takes it, and its programs can be saved; of
    FP8, before `run_decompositions()`, whose ops hold constants that `torch.export.save` leaves out.

    Raises: the model is as it was.
        OptionError: `model` is no module, `policy` or `fallback` is wrong, or a policy function failed.
        RecipeError: unknown recipe, or one whose weights cannot be stored.
        FallbackError: with ``fallback="error"``.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("quantize_'s model", model, "an nn.Module"))
    options = config.parse({"policy": policy or {}, "fallback": fallback})
    entries, default, owners = policies.entries(options.policy), recipes.resolve(recipe), _owners(model)
    chosen: list[tuple[nn.Linear, Recipe]] = []
    said: list[str] = []
    used = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        path = without_wrappers(name)
        entry = policies.first(entries, (path,), (None, *module.weight.shape))
        used.add(entry)
        wanted = entry.recipe if entry else default
        if wanted is None:
            continue
        if isinstance(module.weight, StoredWeight):
            if module.weight.recipe != wanted:
                said.append(
                    f"te_inductor: {path or '(root)'} keeps its weight: it is stored as {module.weight.recipe} already"
                )
            continue
        kind_of(wanted)
        refusal = _refusal(module, owners)
        if refusal is None:
            chosen.append((module, wanted))
        else:
            said.append(f"te_inductor: {path or '(root)'} keeps its weight: {refusal}")
    unused = [entry.name for entry in entries if entry not in used]
    said += [f"te_inductor: policy entry {name!r} matches no linear layer{HIDDEN}" for name in unused]
    if said:
        say("\n".join(said), options.fallback)
    _replace(chosen)
    return model


def _replace(chosen: Sequence[tuple[nn.Linear, Recipe]]) -> None:
    """One after the other, so that two forms of one weight are all that memory has to hold besides the model."""
    done: dict[Tensor, nn.Parameter] = {}
    for module, recipe in chosen:
        if module.weight not in done:
            done[module.weight] = _stored(module.weight, recipe)
        module.weight = done[module.weight]


def _owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def _refusal(module: nn.Linear, owners: Mapping[Tensor, Sequence[nn.Module]]) -> Refusal | None:
    if "weight" not in module._parameters:
        return Refusal(
            "it is computed from other parameters, as by a parametrization, which would have to be removed first"
        )
    weight = module.weight
    others = [type(owner).__name__ for owner in owners[weight] if not isinstance(owner, nn.Linear)]
    if others:
        return Refusal("it is also that of a module of class %s", others[0])
    if weight.dtype not in DTYPES:
        return Refusal("dtype %s is not float32, bfloat16 or float16", str(weight.dtype).removeprefix("torch."))
    if weight.layout != torch.strided or torch.utils._python_dispatch.is_traceable_wrapper_subclass(weight):
        return Refusal("it is a %s, not a plain strided tensor", type(weight).__name__)
    if weight.numel() == 0:
        return Refusal("empty weight %d x %d", *weight.shape)
    if not weight.is_meta and not bool(weight.isfinite().all()):
        return Refusal("it has values that are not finite")
    return None


def _stored(weight: Tensor, recipe: Recipe) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(store(weight.detach(), recipe), requires_grad=False)
