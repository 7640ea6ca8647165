"""`autocast`: the recipe of a region of a program, around compiled functions or inside of them.

# Note [Regions]
Inside a compiled function Dynamo traces `autocast` into two markers, `enter_region(region)` and `exit_region()`,
between which the passes find the calls of the region (passes/graph/regions.py), checkpoints' bodies included,
and which they erase. The region is a constant of the graph, so both compile caches have it in their keys. Under any
other backend the markers, which trace to nothing, do nothing.

Around a compiled function nothing is traced: the region is a context variable, one a thread and one a task of asyncio,
and every graph that depends on it carries a guard that compares its key by value (`compat.guard_on`). An equal recipe
built anew passes the guard, another one is one more compile. It compares the key, not the region, and reads it without
a line of Python, because Python code in a guard can hand over to another thread in the middle of Dynamo's search for a
graph. That search moves what it finds to the front of the list that both threads walk, so the first can miss its own
graph and compile once more than it needs (a guard of Dynamo's own, on saved-tensor hooks, leaves this possible).
Nothing is kept behind the end of a `with`, so that there is no table to grow and no identity to go stale. A `with` ends
its own region, not the innermost: generators share the context of who runs them, and end in any order."""

import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from operator import methodcaller
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from te_inductor import compat, recipes
from te_inductor.errors import NOT_EXPORTED, FallbackWarning, RecipeError, wrong_type
from te_inductor.recipes import Recipe
from te_inductor.recipes.constants import Constant, constant

P = ParamSpec("P")
T = TypeVar("T")


@constant
class Region(Constant):
    """What an `autocast` says. Two that mean the same are equal: a recipe's name is the recipe, none at all is
    disabled."""

    enabled: bool = True
    recipe: Recipe | str | None = None  # None: the default recipe

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise RecipeError(wrong_type("autocast's enabled", self.enabled, "a bool"))
        recipe = None if self.recipe is None else recipes.resolve(self.recipe)
        object.__setattr__(self, "enabled", self.enabled and (recipe is not None or self.recipe is None))
        object.__setattr__(self, "recipe", recipe if self.enabled else None)


_library = torch.library.Library("te_inductor", "FRAGMENT")  # a module-level reference keeps the registrations alive
_library.define(f"enter_region({compat.constant_type_name(Region)} region) -> ()")
_library.define("exit_region() -> ()")
_library.impl("enter_region", lambda region: _entered_in_graph(region), "CompositeImplicitAutograd")
_library.impl("exit_region", lambda: None, "CompositeImplicitAutograd")
enter_region = torch.ops.te_inductor.enter_region.default
exit_region = torch.ops.te_inductor.exit_region.default


class _Entered(NamedTuple):
    by: "autocast"
    region: Region


_DEFAULT = Region()
_DEFAULT_KEY = _DEFAULT.key()
_entered: ContextVar[tuple[_Entered, ...]] = ContextVar("te_inductor.recipes.regions", default=())  # the innermost last
_key: ContextVar[tuple[Any, ...]] = ContextVar("te_inductor.region_key", default=_DEFAULT_KEY)


class _Active:
    """`key` is that of the innermost region, by a property in C."""

    get_key = _key.get
    key = property(methodcaller("get_key"))


_active = _Active()
_compiled: set[tuple[Any, ...]] = set()  # keys of the regions in which a graph was compiled
_said = _said_of_export = False


def active() -> Region:
    """The region that this thread or task is in, outside of all compiled functions."""
    entered = _entered.get()
    return entered[-1].region if entered else _DEFAULT


def _set(entered: tuple[_Entered, ...]) -> None:
    _entered.set(entered)
    _key.set(active().key())


def guard_on_active() -> None:
    """Recompile the graph that is being compiled where the active region is another one."""
    compat.guard_on(__name__, "_active.key")


def note_compile() -> None:
    """Called by the backend. An equal region needs no compile later; another one does, as graphs are guarded by its
    key."""
    _compiled.update({active().key(), *(entered.region.key() for entered in _entered.get())})


class autocast:
    """Context and decorator: in it, and in whatever is called from it, linear layers of compiled code have this recipe.

    Regions nest; the innermost counts. `enabled=False` leaves its layers in high precision, as does ``recipe="none"``;
    `recipe=None` is the default recipe: that of the compile options, else of the environment, else ``"auto"``, whatever
    the regions around say. A policy entry, which names a layer, goes before `recipe`, and not before `enabled=False`. A
    layer's backward has the recipe of its forward, wherever it runs. Each thread has its own region, and each task of
    asyncio. A `with` around a generator's `yield` is around what runs between its items too.

    Outside compiled code it changes nothing; a program that has compiled nothing in it by its end is told so, once.

    Args:
        enabled: whether layers run in low precision.
        recipe: a recipe, or the name of one; ignored where `enabled` is False, as in TransformerEngine.

    Raises:
        RecipeError: `recipe` is no recipe, `enabled` no bool, what it decorates a generator function.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | str | None = None) -> None:
        self.region = Region(enabled, recipe)

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            enter_region(self.region)
        else:
            if torch.compiler.is_exporting():
                _warn_of_export(self.region)
            elif compat.in_uncompiled_frame():
                warnings.warn(_UNCOMPILED, FallbackWarning, stacklevel=2)
            _set((*_entered.get(), _Entered(self, self.region)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if torch.compiler.is_dynamo_compiling():
            exit_region()
        else:
            entered = _entered.get()
            mine = max((place for place, one in enumerate(entered) if one.by is self), default=None)
            if mine is not None:  # a generator may be closed in another thread or task
                _set(entered[:mine] + entered[mine + 1 :])
            if self.region.key() in _compiled:  # so something is in those around it
                _compiled.update(one.region.key() for one in _entered.get())
            exporting = torch.compiler.is_exporting()
            if error is None and not _entered.get() and self.region.enabled and not exporting:
                _warn_if_nothing_compiles(self.region)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        # torch 2.11 would have Dynamo read no field of the region itself.
        enabled, recipe = self.region.enabled, self.region.recipe
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise RecipeError(
                f"autocast decorates the generator function {function.__qualname__}, expected one that runs when"
                " called: write `with autocast(...)` inside it, around what computes and not around a `yield`"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with autocast(enabled, recipe):
                    return await function(*args, **kwargs)

            return call_async  # type: ignore[return-value]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with autocast(enabled, recipe):
                return function(*args, **kwargs)

        return call


# A frame that torch.compile gave up calls them as they are; traced into a graph they are all the same.
for _function in (autocast.__enter__, autocast.__exit__, compat.in_uncompiled_frame):
    compat.never_compile(_function)

_UNCOMPILED = (
    "te_inductor.autocast: a function that torch.compile could not compile enters it, because of a graph break inside"
    " the `with`; what it calls is compiled piece by piece, and layers that it calls itself stay in high precision."
    " Enter autocast around the compiled function, or move what breaks the graph (fullgraph=True names it) out of the"
    " `with`"
)
_NOT_EXPORTED = f"te_inductor.autocast: torch.export takes no recipe, so that {NOT_EXPORTED}"
_NOTHING_COMPILED = (
    "te_inductor.autocast: nothing has been compiled in it by the backend te, so every layer ran in high precision;"
    " autocast"
    ' chooses recipes for compiled code: model = torch.compile(model, backend="te")'
)


def _warn_if_nothing_compiles(region: Region) -> None:
    """Warns, once a program, of a region in which nothing was compiled."""
    global _said
    if not _said and region.key() not in _compiled:
        _said = True
        warnings.warn(_NOTHING_COMPILED, FallbackWarning, stacklevel=3)


def _entered_in_graph(region: Region) -> None:
    """Does nothing when it runs: under any other backend a marker traces to nothing."""
    if torch.compiler.is_exporting():
        _warn_of_export(region)


def export_begins() -> None:
    """Is called where torch.export is: what that leaves out is said once from here on, and now of a region around
    it."""
    global _said_of_export
    _said_of_export = False
    _warn_of_export(active() if _entered.get() else None)


def _warn_of_export(region: Region | None) -> None:
    """Says, once, that export leaves a region out; where it traces one as well, as it runs or as Dynamo has marked
    it."""
    global _said_of_export
    if region is not None and region.enabled and not _said_of_export:
        _said_of_export = True
        warnings.warn(_NOT_EXPORTED, FallbackWarning, stacklevel=4)
