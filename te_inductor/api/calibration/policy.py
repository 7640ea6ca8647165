"""A policy that was chosen by measurement, with what it was chosen by: as a mapping for `options["policy"]`, as a table, as
a file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_inductor import recipes
from te_inductor.api.calibration.times import GEMMS, NAMES, Choice, by_gemm
from te_inductor.errors import OptionError, RecipeError
from te_inductor.presentation.paths import grouped, kind, named
from te_inductor.presentation.printed import Printed
from te_inductor.presentation.tables import Column
from te_inductor.recipes import Recipe

_FORMAT = 1  # of the file
_HIGH = "none"  # the recipe of a layer in high precision


@dataclass(frozen=True)
class CalibratedLayer:
    """What was measured of one layer, and why it has its recipe."""

    fqn: str  # module path, as in `model.named_modules()`
    sizes: tuple[Any, int, int]  # (M, N, K) of its forward in the step that was timed
    beside: tuple[str, ...]  # the layers that have one choice with it, as they share an input or a module, itself too
    lost: dict[str, dict[str, float]]  # by GEMM and recipe, the share of the product that is lost
    time_s: dict[str, float]  # seconds of all that are `beside` it, by recipe, by "none", and as "chosen"
    why: str
    sensitivity: float | None = None  # how far the loss moves, relative to it, where this layer's forward is cast alone
    weight: float = 1.0  # how much what its forward loses counts: 1 in a typical layer


@dataclass(frozen=True, repr=False, eq=False)
class Calibration(Printed, Mapping[str, "Recipe | str"]):
    """A policy: ``options={"policy": calibration}``. `print(calibration)` shows a table, `table(details=True)` one with
    every layer; `save` writes JSON, for a repository, and `load` reads it."""

    policy: dict[str, Choice]  # by glob: a recipe, or None for high precision
    layers: tuple[CalibratedLayer, ...]
    device: str
    rates: str  # where the rates come from
    budget: float
    step_s: float  # seconds of a step, without attention, the loss and the optimizer
    fastest_s: float  # of the fastest policy
    high_s: float  # of a step in high precision
    batches: int
    rank_correlation: float | None = None  # Spearman's, of what layers lose and how far that moves the loss

    def __getitem__(self, glob: str) -> Recipe | str:
        choice = self.policy[glob]
        return _HIGH if choice is None else choice

    def __iter__(self) -> Iterator[str]:
        return iter(self.policy)

    def __len__(self) -> int:
        return len(self.policy)

    def chosen(self, layer: CalibratedLayer) -> dict[str, str]:
        """The recipe of each GEMM of a layer, ``"high_precision"`` where it has none."""
        return by_gemm(self.policy[glob_of(layer.fqn)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = {"format": _FORMAT, **{name: getattr(self, name) for name in _PLAIN}}
        return found | {
            "policy": {glob: _written(choice) for glob, choice in self.policy.items()},
            "layers": [asdict(layer) for layer in self.layers],
        }

    def save(self, path: str | Path) -> Path:
        """Writes a file of JSON, in which a line changes where a choice or a figure does.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path)
        path.write_text(json.dumps(_rounded(self.to_dict()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Reads what `save` wrote. Who edits the file changes the policy.

        Raises:
            OptionError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            policy = {glob: _read(given) for glob, given in found.pop("policy").items()}
            layers = found.pop("layers")
            layers = [{**one, "sizes": tuple(one["sizes"]), "beside": tuple(one["beside"])} for one in layers]
            made = cls(policy=policy, layers=tuple(CalibratedLayer(**one) for one in layers), **found)
            for layer in made.layers:
                made.chosen(layer)
            return made
        except (ValueError, KeyError, TypeError, AttributeError, RecipeError) as error:
            raise OptionError(
                f"{path} is no calibration ({type(error).__name__}: {error}), expected what Calibration.save wrote; run"
                " te_inductor.calibrate again"
            ) from error

    def _headline(self) -> str:
        low = sum(choice is not None for choice in self.policy.values())
        lines = [
            f"{low} of {len(self.policy)} layers in low precision; a step on {self.device} takes {1e3 * self.step_s:.3g} ms,"
            f" {self.step_s / self.fastest_s:.3f} of the fastest choice's, of {self.budget:g} allowed",
            f"in high precision {1e3 * self.high_s:.3g} ms; without attention, the loss and the optimizer, by rates"
            f" {self.rates}; errors are means over {self.batches} batches",
        ]
        if self.rank_correlation is not None:
            lines.append(
                f"rank correlation (Spearman) of what forwards lose, times its weight, and how far that moves the loss:"
                f" {self.rank_correlation:.2f} over {sum(one.sensitivity is not None for one in self.layers)} layers"
            )
        return "\n".join(lines)

    def _cells(self, details: bool) -> tuple[Sequence[Column], Iterable[Sequence[str]]]:
        def key(layer: CalibratedLayer) -> object:
            same = tuple(self.chosen(layer).values()), kind(layer.fqn), layer.why.partition(":")[0]
            return layer.fqn if details else same

        everyone = [layer.fqn for layer in self.layers]
        return _COLUMNS, (self._row(layers, everyone) for layers in grouped(self.layers, key).values())

    def _row(self, layers: Sequence[CalibratedLayer], everyone: Sequence[str]) -> list[str]:
        chosen = self.chosen(layers[0])
        lost = [_percent(layers, [(gemm, name) for gemm in GEMMS]) for name in NAMES]
        return [
            named([layer.fqn for layer in layers], everyone),
            str(len(layers)),
            *chosen.values(),
            _percent(layers, list(chosen.items())),
            *lost,
            _microseconds(layers, "chosen"),
            *(_microseconds(layers, name) for name in (*NAMES, _HIGH)),
            f"{max(one.weight for one in layers):.2g}",
            f"{max(one.sensitivity or 0.0 for one in layers):.2g}" if layers[0].sensitivity is not None else "",
            max((layer.why for layer in layers), key=len),
        ]


def glob_of(fqn: str) -> str:
    """A glob that matches one module path alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in fqn)


_PLAIN = ("device", "rates", "budget", "step_s", "fastest_s", "high_s", "batches", "rank_correlation")
_COLUMNS = (
    Column("layers"),
    Column("n", right=True),
    *(Column(gemm) for gemm in GEMMS),
    Column("lost", right=True),
    *(Column(f"by {name}", right=True, optional=True) for name in NAMES),
    Column("us", right=True),
    *(Column(f"us {name}", right=True, optional=True) for name in (*NAMES, _HIGH)),
    Column("weight", right=True, optional=True),
    Column("loss moves", right=True, optional=True),
    Column("why", prose=True, optional=True),
)


def _percent(layers: Sequence[CalibratedLayer], wanted: Sequence[tuple[str, str]]) -> str:
    """The most that one of some layers loses, of its GEMMs together, each under a recipe."""
    found = [sum(layer.lost.get(gemm, {}).get(name, 0.0) for gemm, name in wanted) for layer in layers]
    known = any(name in by_name for layer in layers for by_name in layer.lost.values() for _, name in wanted)
    return f"{max(found):.3%}" if known else "-" if any(name in NAMES for _, name in wanted) else "0"


def _microseconds(layers: Sequence[CalibratedLayer], name: str) -> str:
    found = [layer.time_s[name] for layer in layers if name in layer.time_s]
    return f"{1e6 * max(found):.0f}" if found else "-"


def _written(choice: Choice) -> Any:
    """A recipe as JSON: its name, and those of the backward's GEMMs where they have others."""
    if choice is None:
        return _HIGH
    others = {gemm: name for gemm, name in by_gemm(choice).items() if name != choice.name}
    return {"recipe": choice.name, "backward": others} if others else choice.name


def _read(given: Any) -> Choice:
    if isinstance(given, str):
        return recipes.resolve(given)
    made = recipes.resolve(given["recipe"])
    backward = recipes.BackwardPrecision(**given["backward"])
    return None if made is None else made.with_backward(backward)


def _rounded(value: Any) -> Any:
    """Figures with four digits, which is more than they mean."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
