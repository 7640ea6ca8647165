"""The model that a command is about, as a factory of the user's returns it.

A factory is a function that takes no arguments, or arguments with defaults, which ``--set`` gives. It returns

- ``(model, inputs)`` or ``(model, inputs, loss)``, or
- a dict with ``model`` and, as needed, ``inputs``, ``kwargs`` and ``loss``.

`inputs` is one tensor, a tuple or list of positional arguments, or a dict of keyword arguments. `loss` takes the
model's output and returns a tensor of one number. The model is on the device and in the mode (`train`, `eval`) that it
is to run in. Each call has to make the model anew; the random seed is set before."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from te_inductor.errors import OptionError, unknown, wrong_type

SEED = 0
_FORMS = "(model, inputs), (model, inputs, loss) or a dict with 'model', 'inputs', 'kwargs', 'loss'"
_KEYS = ("model", "inputs", "kwargs", "loss")


@dataclass
class Case:
    """A model, and one call of it."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None


def made(name: str, settings: Sequence[str] = ()) -> Case:
    """What the factory of that name returns, called with ``NAME=VALUE`` settings.

    Raises:
        OptionError: there is no such factory, it takes no such argument, or returns something else.
    """
    factory, arguments = _found(name), dict(map(_setting, settings))
    _check_arguments(name, factory, arguments)
    torch.manual_seed(SEED)
    return _read(name, factory(**arguments))


def _found(name: str) -> Callable[..., Any]:
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise OptionError(f"model {name!r} has no factory; expected module:factory or path/to/file.py:factory")
    module = _module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(unknown(f"function of {place}", attribute, _public(module)))
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module) or not callable(found):
        raise OptionError(wrong_type(f"model {name!r}", found, f"a function that returns {_FORMS}"))
    return found  # type: ignore[no-any-return]


def _public(module: Any) -> list[str]:
    """What of it can be called, and is its own; where nothing is, what it has imported."""
    found = {key: one for key, one in vars(module).items() if callable(one) and not key.startswith("_")}
    return [key for key, one in found.items() if getattr(one, "__module__", None) == module.__name__] or [*found]


def _module(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise OptionError(f"model file {place} is not there; expected path/to/file.py:factory")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # for dataclasses and pickles of its classes
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, "")  # the current folder, which a console script does not have
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # what the module itself imports
        raise OptionError(f"module {error.name!r} is not found from {Path.cwd()}; expected module:factory") from None


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise OptionError(f"--set {text!r} is no NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a string without quotes


def _check_arguments(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise OptionError(f"factory {name} cannot be called so: {error}; its arguments, for --set: {known}") from None
    except ValueError:  # without a signature
        pass


def _read(name: str, returned: Any) -> Case:
    if isinstance(returned, Mapping):
        strange = [key for key in returned if key not in _KEYS]
        if strange or "model" not in returned:
            raise OptionError(f"factory {name} returned a dict of {', '.join(map(str, returned))}; expected {_FORMS}")
        given = dict(returned)
    elif isinstance(returned, tuple | list) and 2 <= len(returned) <= 3:
        given = dict(zip(("model", "inputs", "loss"), returned, strict=False))
    else:
        raise OptionError(wrong_type(f"what factory {name} returned", returned, _FORMS))
    model, loss = given["model"], given.get("loss")
    inputs: Any = given.get("inputs", ())
    if not callable(model):
        raise OptionError(wrong_type(f"the model of factory {name}", model, "a module or a function"))
    if loss is not None and not callable(loss):
        raise OptionError(wrong_type(f"the loss of factory {name}", loss, "a function of the model's output"))
    kwargs = dict(given.get("kwargs") or {})
    if isinstance(inputs, Mapping):
        kwargs, inputs = {**inputs, **kwargs}, ()
    elif not isinstance(inputs, tuple | list):
        inputs = (inputs,)
    return Case(model, tuple(inputs), kwargs, loss)


def in_bf16(case: Case, keep: bool) -> tuple[Case, contextlib.AbstractContextManager[Any]]:
    """The case as the arms of `bench` run it: under an autocast where parameters are in float32; on the meta device,
    which has none, in bf16."""
    tensors = [one for one in pytree.tree_leaves([case.inputs, case.kwargs]) if isinstance(one, torch.Tensor)]
    parameters = list(case.model.parameters()) if isinstance(case.model, nn.Module) else tensors
    if keep or not any(one.dtype == torch.float32 for one in parameters):
        return case, contextlib.nullcontext()
    if not any(one.is_meta for one in parameters):
        return case, torch.autocast(parameters[0].device.type, torch.bfloat16)
    if isinstance(case.model, nn.Module):
        case.model.bfloat16()
    case.inputs, case.kwargs = pytree.tree_map_only(
        torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, (case.inputs, case.kwargs)
    )
    return case, contextlib.nullcontext()


def options_of(recipe: str | None, policy: Mapping[str, Any] | None) -> dict[str, Any]:
    """Compile options, without those that are to come from the environment."""
    given = {"recipe": recipe, "policy": policy}
    return {name: value for name, value in given.items() if value is not None}
