"""`quantize_`: store the weights of a model's linear layers and experts in low precision, once, for inference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from te_inductor import config, recipes
from te_inductor.api.options import Policy as OptionPolicy
from te_inductor.config import Fallback
from te_inductor.diagnostics import Refusal
from te_inductor.errors import OptionError, wrong_type
from te_inductor.ops import stored_experts
from te_inductor.ops.stored_weight import StoredWeight, as_parameter, kind_of, show_stored, store
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.presentation.paths import grouped, names_of, without_wrappers
from te_inductor.presentation.progress import progress
from te_inductor.recipes import Recipe
from te_inductor.recipes.weight_only import fused
from te_inductor.runtime.weights import followed_weights

ModelT = TypeVar("ModelT", bound=nn.Module)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUTERS = frozenset(("gate", "router"))  # what models call them
CONTAINERS = (nn.ParameterDict, nn.ParameterList)


Refuses = Callable[["MultipliedWeight", Mapping[Tensor, Sequence[nn.Module]]], Refusal | None]


@dataclass(frozen=True)
class MultipliedWeight:
    """A weight, and the module that multiplies by it."""

    module: nn.Module
    parameter: str  # what the module calls it
    names: tuple[str, ...]  # by which a policy may name it
    router: bool = False

    @property
    def weight(self) -> Tensor:
        return getattr(self.module, self.parameter)  # type: ignore[no-any-return]

    @property
    def transposed(self) -> bool:
        """Whether experts' weight is (E, K, N): as transformers marks the class, or as gate and up and down fit
        together, of which the one's columns are the other's rows."""
        marked = getattr(self.module, "is_transposed", None)
        if isinstance(marked, bool):
            return marked
        up, down = (getattr(self.module, name, None) for name in ("gate_up_proj", "down_proj"))
        if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.dim() == down.dim() == 3):
            return False
        return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1] != 2 * down.shape[2]

    @property
    def sizes(self) -> tuple[None, int, int]:
        """(M, N, K) of a matrix."""
        rows, columns = self.weight.shape[-2:]
        return (None, columns, rows) if self.weight.dim() == 3 and self.transposed else (None, rows, columns)

    @torch.no_grad()
    def stored(self, recipe: Recipe, shared: Sequence[Any] = (), weight: Tensor | None = None) -> StoredWeight:
        """The weight, or what it is gathered to, as it is stored with what it shares with others."""
        weight = self.weight.detach() if weight is None else weight
        if weight.dim() == 3:
            return stored_experts.store(weight, recipe, self.transposed)
        return store(weight, recipe, *shared)


def quantize_(
    model: ModelT,
    recipe: str | Recipe = "nvfp4_weight_only",
    policy: OptionPolicy | None = None,
    fallback: Fallback = "warn",
) -> ModelT:
    """Replace the weights of `nn.Linear` modules, and the 3D parameters of experts, by a `StoredWeight` each, in place;
    returns the model.

    Args:
        recipe: "nvfp4_weight_only" (4.5 bits a weight; activations as they are), or "rowwise", "current", "block" (8
            bits; activations are cast as the recipe says); a name or an instance.
        policy: as the compile option: {module-path glob or function: recipe or "none"}, the first that matches wins; a
            function is given None for M. Experts' parameters are named by the module's path or their own.
        fallback: "warn", "error" or "silent", where a layer's weight cannot be stored so or an entry matches nothing.

    NVFP4 weights that serving engines multiply as one matrix, those of q, k and v and of gate and up by their names
    (`q_proj`, `gate_proj`, …), get one scale of the tensor, that of the largest amax.

    Experts' parameters are those of three dimensions of modules whose path or class has "expert" in it, (E, N, K) or
    (E, K, N), and those that a policy entry names in full. A router's weight is stored only if an entry names it. FP8
    weights of experts cast activations where a GPU multiplies many rows, nowhere else.

    The model runs eagerly, by dequantizing, and fast under ``torch.compile(model, backend="te")``. Keys of its
    state_dict stay; it loads what was saved of a quantized model, and of one in high precision. It cannot be trained;
    gradients flow through it to its inputs, and to adapters. `torch.export` takes it, and its programs can be saved; with
    FP8 experts, before `run_decompositions()`, whose ops hold constants that `torch.export.save` leaves out.

    An error leaves the model as it was.

    Raises:
        OptionError: `model` is no module, `policy` or `fallback` is wrong, or a policy function failed.
        RecipeError: unknown recipe, or one whose weights cannot be stored.
        FallbackError: with ``fallback="error"``.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("quantize_'s model", model, "an nn.Module"))
    if followed_weights.of(model.parameters()):
        raise OptionError(
            f"quantize_ of {type(model).__name__}, a view of te_inductor.rollout, expected a model of its own, as a view"
            " shares modules' weights with its model; give te_inductor.rollout another recipe or policy"
        )
    options = config.parse({"policy": policy or {}, "fallback": fallback})
    policies = Policy(options.policy)
    chosen, said = chosen_weights(model, policies, recipes.resolve(recipe), _refusal)
    policies.tell(said, options.fallback)
    _replace(chosen)
    return model


def chosen_weights(
    model: nn.Module, policies: Policy, default: Recipe | None, refusal: "Refuses"
) -> tuple[list[tuple[MultipliedWeight, Recipe]], list[str]]:
    """The weights that are to be stored, each with its recipe, and what is to be said of those that keep theirs."""
    chosen, said, owners = list[tuple[MultipliedWeight, Recipe]](), list[str](), _owners(model)
    for held in _weights(model, [entry.pattern for entry in policies.entries]):
        entry = policies.of(held.names, held.sizes)
        wanted = entry.recipe if entry else None if held.router else default
        if wanted is None:
            continue
        why: object = None
        if isinstance(held.weight, StoredWeight):
            if held.weight.recipe == wanted:
                continue
            why = f"it is stored as {held.weight.recipe} already"
        else:
            kind_of(wanted)
            why = refusal(held, owners)
        if why is None:
            chosen.append((held, wanted))
        else:
            said.append(f"te_inductor: {held.names[0] or '(root)'} keeps its weight: {why}")
    return chosen, said


def _weights(model: nn.Module, patterns: Sequence[object]) -> Iterator[MultipliedWeight]:
    """The weights of linear layers and of experts."""
    beside = adapters_of(model)
    for name, module in model.named_modules():
        path = without_wrappers(name)
        if module in beside:
            continue
        if isinstance(module, nn.Linear):
            yield MultipliedWeight(
                module, "weight", names_of(path), is_router(path, model.get_submodule(name.rpartition(".")[0]))
            )
            continue
        named = "expert" in f"{path} {type(module).__name__}".lower()
        for key, parameter in module._parameters.items():
            full = f"{path}.{key}".strip(".")
            asked = any(isinstance(glob, str) and glob.rpartition(".")[2] == key for glob in patterns)
            known = type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)
            if parameter is not None and parameter.dim() == 3 and (named or asked) and not known:
                yield MultipliedWeight(module, key, tuple(dict.fromkeys((*names_of(full), *names_of(path)))))


def adapters_of(model: nn.Module) -> set[nn.Module]:
    """The modules that peft has put beside layers, whose weights are trained."""
    found = set[nn.Module]()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            found |= {*module.modules()} - {module, *base.modules()}
    return found


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module's state_dict has, without those of the modules in it."""
    kept = {key: one for key, one in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: one for key, one in {**module._parameters, **kept}.items() if one is not None}


def is_router(path: str, parent: nn.Module) -> bool:
    """Whether a linear layer chooses experts: by its name, beside such."""
    return path.rpartition(".")[2] in ROUTERS and any("expert" in key.lower() for key, _ in parent.named_children())


def _replace(chosen: Sequence[tuple[MultipliedWeight, Recipe]]) -> None:
    """One after the other, so that two forms of one weight are all that memory has to hold besides the model."""
    done: dict[Tensor, nn.Parameter] = {}
    with progress(len(chosen), "quantize_") as advance:
        for together in multiplied_as_one(chosen):
            shared = shared_by([held.weight for held, _ in together], together[0][1])
            for held, recipe in together:
                weight = held.weight
                if weight not in done:
                    done[weight] = as_parameter(held.stored(recipe, shared))
                setattr(held.module, held.parameter, done[weight])
                show_stored(held.module)
                advance()


def shared_by(weights: Sequence[Tensor], recipe: Recipe) -> tuple[Any, ...]:
    """What weights share that are multiplied as one matrix."""
    with torch.no_grad():
        return kind_of(recipe).shared([weight.detach() for weight in weights]) if weights[1:] else ()


def multiplied_as_one(
    chosen: Sequence[tuple[MultipliedWeight, Recipe]],
) -> Iterator[list[tuple[MultipliedWeight, Recipe]]]:
    """The weights in groups of those that are one matrix to engines, in the order of the first of each."""

    def key(place: int) -> object:
        held, recipe = chosen[place]
        layers = fused(held.names[0]) if held.weight.dim() == 2 else None
        return (layers, recipe) if layers else place

    for places in grouped(range(len(chosen)), key).values():
        yield [chosen[place] for place in places]


def _owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what compiles it, or copies it to ranks."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def of_form(held: MultipliedWeight, owners: Mapping[Tensor, Sequence[nn.Module]]) -> Refusal | None:
    """Why a weight cannot be stored, whatever values it has."""
    refusal = of_structure(held, owners)
    if refusal:
        return refusal
    weight = held.weight
    if weight.layout != torch.strided or torch.utils._python_dispatch.is_traceable_wrapper_subclass(weight):
        return Refusal("it is a %s, not a plain strided tensor", type(weight).__name__)
    return None


def _refusal(held: MultipliedWeight, owners: Mapping[Tensor, Sequence[nn.Module]]) -> Refusal | None:
    refusal, weight = of_form(held, owners), held.weight
    if refusal:
        return refusal
    if not weight.is_meta and not bool(weight.isfinite().all()):
        return Refusal("it has values that are not finite")
    return None


def of_structure(held: MultipliedWeight, owners: Mapping[Tensor, Sequence[nn.Module]]) -> Refusal | None:
    """Why a weight cannot be stored, whatever values it has and however it is sharded."""
    if held.parameter not in held.module._parameters:
        return Refusal(
            "it is computed from other parameters, as by a parametrization, which would have to be removed first"
        )
    weight = held.weight
    kind = nn.Linear if weight.dim() == 2 else type(held.module)
    others = [type(owner).__name__ for owner in owners[weight] if not isinstance(owner, kind)]
    if others:
        return Refusal("it is also that of a module of class %s", others[0])
    if weight.dtype not in DTYPES:
        return Refusal("dtype %s is not float32, bfloat16 or float16", str(weight.dtype).removeprefix("torch."))
    if weight.numel() == 0:
        return Refusal("empty weight %s", " x ".join(str(size) for size in weight.shape))
    return requirements.too_long(*held.sizes[1:])
