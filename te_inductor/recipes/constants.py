"""Frozen value objects that stand in a graph as op arguments: torch's "opaque value types".

Two equal constants are one to Dynamo's guards, to CSE and to both compile caches; a field that changes anything changes
the key. What cannot be written down exactly is refused here, so that no key silently leaves a field out.
"""

import dataclasses
import enum
import hashlib
import math
import re
import threading
import types
import uuid
import weakref
from typing import Any, TypeVar

import torch
from typing_extensions import Self, dataclass_transform

from te_inductor.compat import ConstantMeta, register_constant
from te_inductor.errors import RecipeError, wrong_type

T = TypeVar("T")


class Constant(metaclass=ConstantMeta):  # type: ignore[metaclass]
    """Base of frozen dataclasses whose fields are bool, int, float, str, None, enum members, tuples, Constants, or
    plain functions without a closure. Functions are equal where their code is, so that one defined anew is the same."""

    @property
    def fields(self) -> tuple[Any, ...]:
        """Arguments that make this constant again."""
        return tuple(vars(self).values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a constant by the constructor, which checks the fields: a pickled constant may come from
        anywhere."""
        vars(self).update(vars(type(self)(**state)))

    def key(self) -> tuple[Any, ...]:
        """What makes two constants equal, in nested tuples that Python compares without running any Python code."""
        return type(self), *[one if type(one) in _PLAIN else _comparable(one) for one in self.fields]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constant) and self.key() == other.key())

    def __hash__(self) -> int:
        return hash(self.key())

    def __deepcopy__(self, memo: object) -> Self:
        """Nothing in it can change. Dynamo copies what it guards on, and compares what is the same object at once."""
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Source that rebuilds this object, and the names that the source uses."""
        names: dict[str, Any] = {}
        return _source(self, names), names


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def constant(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass registered with torch under its own name."""
    made = dataclasses.dataclass(frozen=True, eq=False)(cls)
    register_constant(made)
    return made


_PLAIN = frozenset((bool, int, float, str, type(None)))  # of which `_comparable` has nothing to ask


def _comparable(value: object) -> object:
    if isinstance(value, Constant):
        return value.key()
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return _digest(value) if isinstance(value, types.FunctionType) else value


def source_name(cls: type) -> str:
    """The name by which source refers to a class: its module's, its own, and a number where another class has that
    name.

    A graph has one namespace for all its constants, so two classes never share a name.
    """
    with _naming:
        if cls not in _names:
            module = cls.__module__.removeprefix("te_inductor.")
            stem = re.sub(r"\W", "_", f"te_inductor_{module}_{cls.__qualname__}")
            name, number = stem, 1
            while _named.get(name) is not None:
                number += 1
                name = f"{stem}_{number}"
            _names[cls], _named[name] = name, cls
        return _names[cls]


_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_named: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_naming = threading.Lock()


def _source(value: object, names: dict[str, Any]) -> str:
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return repr(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(f"a recipe field is {value}, expected a finite number")
        return repr(value)
    if isinstance(value, tuple):
        return f"({''.join(_source(item, names) + ', ' for item in value)})"
    if isinstance(value, types.FunctionType):
        read = hashlib.sha256(repr(_read(value, set())).encode()).hexdigest()[:8]
        name = f"te_inductor_function_{_digest(value)}_{read}"
        names[name] = value
        return name
    name = source_name(type(value))
    if isinstance(value, enum.Enum):
        names[name] = type(value)
        return f"{name}.{value.name}"
    if isinstance(value, Constant) and dataclasses.is_dataclass(value):
        names[name] = type(value)
        fields = (f"{f.name}={_source(getattr(value, f.name), names)}" for f in dataclasses.fields(value))
        return f"{name}({', '.join(fields)})"
    raise RecipeError(
        wrong_type("a recipe field", value, "a number, string, enum member, tuple, Constant or plain function")
    )


_PROCESS = uuid.uuid4().hex


def _read(function: types.FunctionType, known: set[types.FunctionType]) -> list[tuple[str, Any]]:
    """Stands in cache keys for the globals that a function reads, itself or by functions that it calls, as a trace has
    written them into the graph. What cannot be written down is another one in each process, but for modules."""
    known.add(function)
    found: list[tuple[str, Any]] = []
    for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[name]
        try:
            text = value.__name__ if value is torch or value is math else _exact(value, name)
        except RecipeError:
            text = f"{_PROCESS} {id(value)}"
        is_new = isinstance(value, types.FunctionType) and value not in known
        found.append((name, [text, _read(value, known)] if is_new else text))
    return found


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _digest(function: types.FunctionType) -> str:
    """Stands for a function's code where two are compared: an edited function is another one. What it calls is not
    looked into."""
    if function.__closure__:
        raise RecipeError(
            f"function {function.__qualname__} closes over {', '.join(function.__code__.co_freevars)}, which no cache"
            " key holds, expected a function without a closure; make what it needs a default argument or a global"
        )
    name = function.__qualname__
    defaults = [_exact(value, name) for value in function.__defaults__ or ()]
    named = [(key, _exact(value, name)) for key, value in sorted((function.__kwdefaults__ or {}).items())]
    identity = (function.__module__, name, defaults, named, _code(function.__code__, name))
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _code(code: types.CodeType, function: str) -> tuple[Any, ...]:
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    constants = [_code(c, function) if isinstance(c, types.CodeType) else _exact(c, function) for c in code.co_consts]
    return code.co_code, getattr(code, "co_exceptiontable", b""), arguments, names, constants


def _exact(value: object, function: str) -> str:
    """Text that two values share only where they are equal and stay so.

    Raises:
        RecipeError: there is no such text: the value may change, or its repr leaves something out.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if value is None or value is ... or type(value) in (bool, int, float, complex, str, bytes, torch.dtype):
        return repr(value)
    if type(value) is tuple:
        return f"({', '.join(_exact(item, function) for item in value)})"
    if type(value) is frozenset:  # as in `x in {1, 2}`
        return f"frozenset({', '.join(sorted(_exact(item, function) for item in value))})"
    if isinstance(value, slice):
        return f"slice{_exact((value.start, value.stop, value.step), function)}"
    if isinstance(value, Constant):
        return _source(value, {})
    if isinstance(value, types.FunctionType):
        return f"function {_digest(value)}"
    raise RecipeError(
        wrong_type(f"a default argument of function {function}", value, "a number, string, enum member, dtype, tuple,")
        + " Constant or plain function, which cache keys can hold; make a tuple of it, or build it inside of the function"
    )
